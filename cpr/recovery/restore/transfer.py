"""Transfer of rows from memory that one worker holds into the live shards of another, in bounded messages.

All ranks walk through the same plan in the same order, and each takes part where it is the source or the
target, so that no two wait for each other. Optimizer state with one number a row, of tables split by columns,
follows the same rules as when it comes from a checkpoint (`cpr.checkpoint.load.scatter`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.format.row_schema import RowBatch
from cpr.checkpoint.load.scatter import Target
from cpr.extent import Extent, Interval
from cpr.recovery.decide.transfer_plan import Band, ShardSources, Source
from cpr.shards.shard import TableShard, bytes_per_row

MESSAGE_BYTES: Final = 32 * 2**20
"""Largest message, unless a single row is larger."""
Columns = Mapping[str, Tensor]


class RowTransfer:
    """This rank's part in a transfer plan.

    Args:
        group: all ranks.
        shards: of this rank.
        held: columns of what this rank holds, `[num_rows, ...]` on the CPU, in the order of `Held.index`.
        extents: of the same shards, in the same order.
    """

    def __init__(
        self,
        group: RankGroup,
        shards: Sequence[TableShard],
        held: Sequence[Columns],
        extents: Sequence[Extent],
    ) -> None:
        self._group = group
        self._shards = {shard.extent: shard for shard in shards}
        self._held = list(zip(held, extents, strict=True))
        self._bytes = 0

    @torch.no_grad()
    def move(self, plan: Sequence[ShardSources]) -> int:
        """Carry out a plan, the same on all ranks; returns the bytes copied into shards of this rank."""
        for sources in plan:
            extent = sources.needed.extent
            mine = None
            if sources.needed.rank == self._group.rank:
                mine = self._shards[extent]
                mine.flush()
            for band in sources.bands:
                if band.sources:
                    self._move_band(sources.needed.rank, mine, extent, band)
            if mine is not None:
                mine.invalidate()
        return self._bytes

    def _move_band(self, rank: int, mine: TableShard | None, extent: Extent, band: Band) -> None:
        parts = [extent.narrowed(band.rows, source.cols) for source in band.sources]
        target = Target(mine.narrow(*band.rows), parts) if mine is not None else None
        for source, part in zip(band.sources, parts, strict=True):
            if source.rank == rank:
                if target is not None:
                    self._lay(target, part, band.rows[0], self._columns(source, band.rows))
            elif target is not None:
                self._receive(target, source, part)
            elif source.rank == self._group.rank:
                self._send(rank, source, band.rows)
        if target is not None:
            target.finish()

    def _send(self, rank: int, source: Source, rows: Interval) -> None:
        for block in _blocks(rows, _row_bytes(self._columns(source, rows))):
            columns = self._columns(source, block)
            data = [columns[name].contiguous().view(-1).view(torch.uint8) for name in sorted(columns)]
            self._group.send(torch.cat(data), rank)

    def _receive(self, target: Target, source: Source, part: Extent) -> None:
        like = {
            name: column[:, : part.num_cols] if column.dim() == 2 else column
            for name, column in target.shard.columns.items()
        }
        for begin, end in _blocks(part.rows, _row_bytes(like)):
            data = torch.empty((end - begin) * _row_bytes(like), dtype=torch.uint8)
            self._group.receive(data, source.rank)
            columns, first = {}, 0
            for name in sorted(like):
                last = first + (end - begin) * bytes_per_row(like[name])
                flat = data[first:last].clone().view(like[name].dtype)  # clone: aligned for any dtype
                columns[name] = flat.view(end - begin, *like[name].shape[1:])
                first = last
            self._lay(target, part, begin, columns)

    def _lay(self, target: Target, part: Extent, first_row: int, columns: Columns) -> None:
        target.write(RowBatch(first_row, None, dict(columns)), part)
        self._bytes += sum(column.nbytes for column in columns.values())

    def _columns(self, source: Source, rows: Interval) -> Columns:
        """Views of what this rank holds."""
        held, extent = self._held[source.index]
        here = slice(rows[0] - extent.row_offset, rows[1] - extent.row_offset)
        cols = slice(source.cols[0] - extent.col_offset, source.cols[1] - extent.col_offset)
        return {
            name: column[here, cols] if column.dim() == 2 else column[here] for name, column in held.items()
        }


def _row_bytes(columns: Columns) -> int:
    return sum(bytes_per_row(column) for column in columns.values())


def _blocks(rows: Interval, row_bytes: int) -> Iterator[Interval]:
    step = max(1, MESSAGE_BYTES // row_bytes)
    for begin in range(rows[0], rows[1], step):
        yield begin, min(begin + step, rows[1])
