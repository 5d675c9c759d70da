"""MFU: saves the most frequently used rows."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from cpr.priority.backlog import Backlog
from cpr.priority.tracker import RowTracker, TrackedGroup, top_rows
from cpr.shards.lookups import Lookups

DENSE: Final = 4
"""Rows per lookup up to which counting goes over the whole table, which is faster but costs time per row."""


class FrequencyTracker(RowTracker):
    """Counts each row's lookups since its last save, in 4 bytes a row (CPR-MFU).

    The paper leaves open, here: every lookup counts, so an id that a batch has five times counts five times;
    ties go to the lowest rows. The limit of a count, 2^31 - 1, is reached by a row with 2,000 lookups in each
    step after a million steps without a save.

    On the CPU lookups are counted some batches at a time (`Backlog`), table by table.
    """

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._is_on_cpu: Final = group.device.type == "cpu"
        self._features: Final[dict[int, list[int]]] = {}
        """Features of each prioritised table."""
        for feature, table in enumerate(group.layout.feature_tables):
            if group.tables[table].budget:
                self._features.setdefault(table, []).append(feature)
        self._ones = torch.ones(0, dtype=self.dtype, device=group.device)
        self._saving: Final[dict[int, Tensor]] = {}
        self._backlog: Final = Backlog(group, self._count)

    def see(self, lookups: Lookups) -> None:
        """Count the lookups, now or before the counts are read."""
        self._backlog.see(lookups)

    def values(self, table: int) -> Tensor:
        """The live counts of a table's rows: `[num_rows]`."""
        self._backlog.sweep()
        return super().values(table)

    def choose(self, table: int) -> Tensor:
        """The rows with the highest counts."""
        values = self.values(table)
        rows = top_rows(values, self._tables[table].budget)
        self._saving[table] = values[rows]  # subtracted at `confirm`, to keep lookups in the meantime
        return rows

    def confirm(self, table: int, rows: Tensor) -> None:
        """Keep only counts since the choice."""
        self.values(table)[rows] -= self._saving.pop(table)

    def take_back(self, table: int, rows: Tensor) -> None:
        """Keep all counts."""
        del self._saving[table]

    def _count(self, passes: Sequence[Lookups]) -> None:
        if self._is_on_cpu:
            self._count_by_table(passes)
        else:  # on a GPU one operation for all tables is fastest
            for lookups in passes:
                self._add_ones(self._values, lookups.rows)

    def _count_by_table(self, passes: Sequence[Lookups]) -> None:
        ids = [each.ids.numpy() for each in passes]
        ends = [each.ends.tolist() for each in passes]
        for table, features in self._features.items():
            looked_up = [
                of_pass[end[feature] : end[feature + 1]]
                for of_pass, end in zip(ids, ends, strict=True)
                for feature in features
            ]
            found = np.concatenate(looked_up, dtype=np.int64)
            counts = super().values(table)
            if found.size and counts.numel() <= DENSE * found.size:
                # a third of a scatter's time per lookup, and some time per row
                new = np.bincount(found)
                counts.numpy()[: new.size] += new.astype(np.int32)
            elif found.size:
                self._add_ones(counts, torch.from_numpy(found))

    def _add_ones(self, counts: Tensor, rows: Tensor) -> None:
        if self._ones.numel() < rows.numel():
            self._ones = self._ones.new_ones(rows.numel())
        counts.scatter_add_(0, rows, self._ones[: rows.numel()])
