"""Snapshots: copies of rows of live shards in staging buffers, made piece by piece.

Within a piece a row and its optimizer state are from one moment, because the piece is copied between two
updates. A rolling snapshot copies some pieces after each step; a consistent one copies all of them between
the same two updates.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cpr.checkpoint.format.row_file import RowBatch
from cpr.checkpoint.save.staging import place_columns, rows_per_piece
from cpr.shards.shard import TableShard


@dataclass(frozen=True, eq=False)
class StagedRows:
    """Rows of a shard that were copied into a buffer between two updates."""

    shard: TableShard
    rows: RowBatch
    """Views into `buffer`."""
    buffer: Tensor
    """The pool's buffer, to be released after writing."""
    step: int


@dataclass(frozen=True, eq=False)
class RowSelection:
    """The rows of one shard that a save copies."""

    shard: TableShard
    ids: Tensor | None
    """Row ids of the table, int64 `[n]` on the CPU, ascending, without duplicates; None: all rows."""

    def __len__(self) -> int:
        return self.shard.num_rows if self.ids is None else self.ids.numel()


def shards_named(shards: Sequence[TableShard], names: Collection[str]) -> list[TableShard]:
    """Shards by name, in the order of the names; raises ValueError if there is none of some name."""
    by_name = {shard.name: shard for shard in shards}
    if unknown := sorted(set(names) - set(by_name)):
        raise ValueError(f"this rank has no shard {unknown[0]!r}; it has {', '.join(by_name) or 'none'}")
    return [by_name[name] for name in names]


def can_wait(shard: TableShard) -> bool:
    """Whether rows may be copied in the background of training, which announces updates of this shard."""
    return shard.updated_in_backward and all(column.device.type == "cpu" for column in shard.columns.values())


def select_rows(shards: Sequence[TableShard], rows: Mapping[str, Tensor]) -> list[RowSelection]:
    """Make selections from row ids of the table by `TableShard.name`.

    The ids are of any integer dtype and order; duplicates count once.

    Raises:
        ValueError: there is no such shard on this rank, or it does not hold such a row.
    """
    selections = []
    for shard, asked in zip(shards_named(shards, rows), rows.values(), strict=True):
        ids = _ascending(asked.detach().to("cpu", torch.int64, copy=True))
        if ids.numel() and not (
            shard.row_offset <= int(ids[0]) and int(ids[-1]) < shard.row_offset + shard.num_rows
        ):
            raise ValueError(
                f"rows {int(ids[0])} to {int(ids[-1])} were asked of {shard.name}, which holds rows "
                f"{shard.row_offset} to {shard.row_offset + shard.num_rows - 1}"
            )
        selections.append(RowSelection(shard, ids))
    return selections


class Snapshot:
    """Copies the selected rows piece by piece, those first that cannot be copied in the background."""

    def __init__(self, selections: Sequence[RowSelection]) -> None:
        self._places = self._plan(sorted(selections, key=lambda selection: can_wait(selection.shard)))
        self._next = next(self._places, None)
        self._flushed: tuple[TableShard, int] | None = None

    @property
    def done(self) -> bool:
        """Whether all rows have been copied."""
        return self._next is None

    @property
    def is_urgent(self) -> bool:
        """Whether the next piece must be copied before training continues, see `can_wait`."""
        return self._next is not None and not can_wait(self._next[0].shard)

    def copy_next(self, buffer: Tensor, step: int) -> StagedRows:
        """Copy the next piece into `buffer`, uint8 `[PIECE_BYTES]`."""
        assert self._next is not None
        selection, begin, end = self._next
        self._next = next(self._places, None)
        shard, num_rows = selection.shard, end - begin
        if self._flushed != (shard, step):
            shard.flush()
            self._flushed = (shard, step)
        columns = place_columns(buffer, shard.columns, num_rows)
        if selection.ids is None:
            for name, source in shard.columns.items():
                columns[name].copy_(source.detach()[begin:end])
            return StagedRows(shard, RowBatch(shard.row_offset + begin, None, columns), buffer, step)
        ids = selection.ids[begin:end]
        local = ids - shard.row_offset if shard.row_offset else ids
        for name, source in shard.columns.items():
            _gather(source.detach(), local, columns[name])
        first_row = int(ids[0]) if num_rows else shard.row_offset
        return StagedRows(shard, RowBatch(first_row, ids, columns), buffer, step)

    @staticmethod
    def _plan(selections: Sequence[RowSelection]) -> Iterator[tuple[RowSelection, int, int]]:
        for selection in selections:
            per_piece = rows_per_piece(selection.shard.columns)
            for begin in range(0, len(selection), per_piece):
                yield selection, begin, min(begin + per_piece, len(selection))


def _ascending(ids: Tensor) -> Tensor:
    """Ids sorted and without duplicates; checking whether they are already is much cheaper than sorting."""
    return ids if bool((ids[1:] > ids[:-1]).all()) else torch.unique(ids)


def _gather(source: Tensor, rows: Tensor, out: Tensor) -> None:
    if source.device.type == "cpu":
        torch.index_select(source, 0, rows, out=out)
    else:
        out.copy_(source.index_select(0, rows.to(source.device)))
