"""Copies loaded rows into the live tensors of one shard, whatever shards they were saved from.

Weights and optimizer state with one number per element are copied column by column. An optimizer with one
number per row (row-wise Adagrad) keeps one for each *shard* of the row where a table is split by columns. So
under another split there is no exact value: a shard that is a part of a saved one takes its number, and a
shard that covers several takes their mean, weighted by the columns in common; the mean of equal numbers is
exact. To average the newest numbers of all saves, they are kept apart until the end, in one vector for each
range of columns between edges of saved shards; a shard that was saved with its present columns needs none.
"""

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from cpr.checkpoint.format.row_file import RowBatch
from cpr.extent import Extent, common
from cpr.shards.shard import TableShard

Index = slice | Tensor
"""Index of rows of a tensor: a range, or int64 `[n]`."""

MEAN_ROWS: Final = 2**20


class Target:
    """A live shard that saved rows are copied into, oldest first.

    Several threads may copy disjoint rows at the same time. `sources` are the extents of all saved shards
    with rows that will be copied, and perhaps others.
    """

    def __init__(self, shard: TableShard, sources: Iterable[Extent]) -> None:
        self.shard, self.extent = shard, shard.extent
        self._columns = {name: column.detach() for name, column in shard.columns.items()}
        edges = {edge for each in sources if (part := each.overlap(self.extent)) for edge in part.cols}
        self._ranges = list(pairwise(sorted(edges)))
        self._apart: dict[str, list[Tensor]] = {}
        if len(self._ranges) > 1:
            for name, column in self._columns.items():
                if column.dim() == 1:  # uninitialised, so that pages without saved rows are never touched
                    self._apart[name] = [torch.empty_like(column, device="cpu") for _ in self._ranges]

    def wants(self, first_row: int, last_row: int) -> bool:
        """Whether the shard holds some row from first to last."""
        return common(self.extent.rows, (first_row, last_row + 1)) is not None

    def write(self, rows: RowBatch, source_extent: Extent) -> None:
        """Overwrite rows by those of a saved shard of some extent; rows that are not held are ignored."""
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
        """Average the row-wise state of several saved shards; called once, after all rows were copied."""
        widths = [high - low for low, high in self._ranges]
        for name, vectors in self._apart.items():
            column = self._columns[name]
            for begin in range(0, self.shard.num_rows, MEAN_ROWS):
                rows = slice(begin, begin + MEAN_ROWS)
                parts = [vector[rows].double() * width for vector, width in zip(vectors, widths, strict=True)]
                mean = torch.stack(parts).sum(0) / sum(widths)
                _copy(mean, slice(None), column, rows)

    def _choose(self, rows: RowBatch) -> tuple[slice, Index]:
        """The range of `rows` that the shard holds, and the index of these rows in the shard."""
        first, (offset, after_last) = rows.first_row, self.extent.rows
        if rows.ids is None:
            begin, end = max(first, offset), min(first + len(rows), after_last)
            return slice(begin - first, end - first), slice(begin - offset, end - offset)
        chosen = slice(*torch.searchsorted(rows.ids, torch.tensor([offset, after_last])).tolist())
        return chosen, rows.ids[chosen] - offset


def _copy(source: Tensor, chosen: slice, target: Tensor, rows: Index) -> None:
    values = source[chosen]
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        values = values.to(target.device, target.dtype)
        target.index_copy_(0, rows.to(target.device), values)
