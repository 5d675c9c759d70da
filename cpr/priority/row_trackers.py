"""Simple trackers for comparison: most recently used rows (MRU), and all touched rows."""

from typing import ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.tracker import RowTracker, TrackedGroup, top_rows
from cpr.shards.lookups import Lookups


class RecencyTracker(RowTracker):
    """Records the forward pass in which each row was looked up last, in 4 bytes a row.

    Among rows of the same pass, the lowest are saved. Counts up to 2^31 - 1 passes.
    """

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._now = int(self._values.max())  # surviving memory must stay older than new lookups
        self._chosen_at: Final[dict[int, int]] = {}

    def see(self, lookups: Lookups) -> None:
        """See `Tracker.see`."""
        self._now += 1
        self._values.scatter_(0, lookups.rows, self._now)

    def choose(self, table: int) -> Tensor:
        """The rows that were looked up last."""
        self._chosen_at[table] = self._now
        return top_rows(self.values(table), self._tables[table].budget)

    def confirm(self, table: int, rows: Tensor) -> None:
        """Drop the saved rows, unless they were looked up since."""
        values = self.values(table)
        seen_at = values[rows]
        values[rows] = seen_at.where(seen_at > self._chosen_at[table], 0)


class TouchedTracker(RowTracker):
    """Records in one byte a row whether it was looked up (incremental saving); ignores the budget."""

    dtype: ClassVar[torch.dtype] = torch.uint8
    TOUCHED: ClassVar = 1
    SAVING: ClassVar = 2
    """Touched before a save chose the row, and not since."""

    def see(self, lookups: Lookups) -> None:
        """See `Tracker.see`."""
        self._values.scatter_(0, lookups.rows, self.TOUCHED)

    def choose(self, table: int) -> Tensor:
        """All rows that were looked up."""
        values = self.values(table)
        rows = torch.nonzero(values).view(-1)
        values[rows] = self.SAVING
        return rows

    def confirm(self, table: int, rows: Tensor) -> None:
        """Drop the saved rows, unless they were looked up since."""
        values = self.values(table)
        now = values[rows]
        values[rows] = now.where(now == self.TOUCHED, 0)
