"""MFU: the most frequently used rows since they were last saved."""

from typing import Final

import torch
from torch import Tensor

from cpr.priority.backlog import Backlog
from cpr.priority.top import top_rows
from cpr.priority.tracker import RowTracker, TrackedGroup
from cpr.shards.lookups import Lookups


class FrequencyTracker(RowTracker):
    """Counts each row's lookups since it was last saved, in 4 bytes a row (CPR-MFU).

    Our choices, the paper's not being known: each lookup counts, so an id that a batch has five times counts
    five times; of rows with equal counts the lowest are saved. A count reaches 2^31 - 1 at most: a row that
    is looked up 2,000 times in every step gets there after a million steps in which it was never saved.

    On the CPU lookups are counted some batches at a time (`Backlog`).
    """

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._ones = torch.ones(0, dtype=self.dtype, device=group.device)
        self._under_way: Final[dict[int, Tensor]] = {}
        self._backlog: Final = Backlog(group, self._count)

    def see(self, lookups: Lookups) -> None:
        """Count, now or before anybody asks."""
        self._backlog.see(lookups)

    def values(self, table: int) -> Tensor:
        """The counts of a table's rows, live: `[num_rows]`."""
        self._backlog.sweep()
        return super().values(table)

    def choose(self, table: int) -> Tensor:
        """The rows with the highest counts."""
        values = self.values(table)
        rows = top_rows(values, self._tables[table].budget)
        self._under_way[table] = values[rows]
        return rows

    def confirm(self, table: int, rows: Tensor) -> None:
        """Only what was counted since is left."""
        self.values(table)[rows] -= self._under_way.pop(table)

    def take_back(self, table: int, rows: Tensor) -> None:
        """The counts go on."""
        del self._under_way[table]

    def _count(self, lookups: Lookups) -> None:
        rows = lookups.rows
        if self._ones.numel() < rows.numel():
            self._ones = self._ones.new_ones(rows.numel())
        self._values.scatter_add_(0, rows, self._ones[: rows.numel()])
