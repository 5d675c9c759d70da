"""Where loaded rows go: into the live tensors of one shard, whatever shards they were saved from.

Weights and optimizer state with one number an element go where they belong, column by column. An optimizer
that keeps one number a row (row-wise Adagrad) keeps one for each *shard* of the row where a table is split by
columns. So under another split there is no exact answer: a shard that is a part of a saved one takes its
number as it is, and a shard that covers several takes their mean, weighted by the columns in common. Of equal
numbers the mean is exact. To average the newest numbers of all saves, they are kept apart until the end, in
one vector for each range of columns that some saved shard ends at; shards that were split as they are now
need none.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from cpr.checkpoint.format.row_file import Rows
from cpr.extent import Extent, common
from cpr.shards.shard import TableShard

Index = slice | Tensor
"""Some rows of a tensor: int64 `[n]`, or a range."""

MEAN_ROWS: Final = 2**20
"""Rows that are averaged at a time."""


class Target:
    """A shard, or some rows of it, that rows are laid into, oldest first.

    Rows that are disjoint may be laid by several threads at a time.

    Args:
        shard: where they go.
        sources: of all that will be laid into it; others do not matter.
        ids: the rows of the table that are wanted, int64 `[n]` on the CPU, ascending, without duplicates, all
            in the shard; None: all rows of the shard.
    """

    def __init__(self, shard: TableShard, sources: Iterable[Extent], ids: Tensor | None = None) -> None:
        self.shard, self.extent = shard, shard.extent
        self._ids = ids
        self._columns = {name: column.detach() for name, column in shard.columns.items()}
        edges = {edge for each in sources if (part := each.overlap(self.extent)) for edge in part.cols}
        self._ranges = list(pairwise(sorted(edges)))
        self._apart: dict[str, list[Tensor]] = {}
        if len(self._ranges) > 1:
            for name, column in self._columns.items():
                if column.dim() == 1:  # empty: pages of rows that are not wanted are never touched
                    self._apart[name] = [torch.empty_like(column, device="cpu") for _ in self._ranges]

    def wants(self, first_row: int, last_row: int) -> bool:
        """Whether some row from first to last is to be laid."""
        if self._ids is None:
            return common(self.extent.rows, (first_row, last_row + 1)) is not None
        begin, end = _search(self._ids, first_row, last_row + 1)
        return begin < end

    def lay(self, rows: Rows, source_extent: Extent) -> None:
        """Copy what is wanted of `rows`, which are some of those of `source_extent`, over what is there."""
        part = source_extent.overlap(self.extent)
        if part is None:
            return
        begin, end = part.cols
        here = slice(begin - self.extent.col_offset, end - self.extent.col_offset)
        there = slice(begin - source_extent.col_offset, end - source_extent.col_offset)
        source, target = self._choose(rows)
        for name, column in self._columns.items():
            saved = rows.columns[name]
            if column.dim() == 2:
                _copy(saved[:, there], source, column[:, here], target)
            elif name not in self._apart:
                _copy(saved, source, column, target)
            else:
                for (low, high), apart in zip(self._ranges, self._apart[name], strict=True):
                    if begin <= low and high <= end:
                        _copy(saved, source, apart, target)

    def finish(self) -> None:
        """Average what was kept apart. Call once, when everything has been laid."""
        widths = [high - low for low, high in self._ranges]
        for name, vectors in self._apart.items():
            column = self._columns[name]
            for rows in self._blocks():
                parts = [vector[rows].double() * width for vector, width in zip(vectors, widths, strict=True)]
                mean = torch.stack(parts).sum(0) / sum(widths)
                _copy(mean, slice(None), column, rows)

    def _choose(self, rows: Rows) -> tuple[Index, Index]:
        """What to take of `rows`, and the rows of the shard where it goes."""
        first, (offset, after_last) = rows.first_row, self.extent.rows
        if self._ids is None:
            if rows.ids is None:
                begin, end = max(first, offset), min(first + len(rows), after_last)
                return slice(begin - first, end - first), slice(begin - offset, end - offset)
            chosen = slice(*_search(rows.ids, offset, after_last))
            return chosen, rows.ids[chosen] - offset
        if rows.ids is None:
            wanted = self._ids[slice(*_search(self._ids, first, first + len(rows)))]
            return wanted - first, wanted - offset
        hits = torch.isin(rows.ids, self._ids)
        return hits.nonzero().squeeze(1), rows.ids[hits] - offset

    def _blocks(self) -> Iterator[Index]:
        if self._ids is not None:
            yield from torch.split(self._ids - self.shard.row_offset, MEAN_ROWS)
        else:
            for begin in range(0, self.shard.num_rows, MEAN_ROWS):
                yield slice(begin, begin + MEAN_ROWS)


def _search(ascending: Tensor, *values: int) -> list[int]:
    return torch.searchsorted(ascending, torch.tensor(values)).tolist()


def _copy(source: Tensor, chosen: Index, target: Tensor, rows: Index) -> None:
    values = source[chosen] if isinstance(chosen, slice) else source.index_select(0, chosen)
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        values = values.to(target.device, target.dtype)
        target.index_copy_(0, rows.to(target.device), values)
