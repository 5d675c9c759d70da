"""MRU, to compare with: the rows that were looked up last."""

from typing import Final

from torch import Tensor

from cpr.priority.top import top_rows
from cpr.priority.tracker import RowTracker, TrackedGroup
from cpr.shards.lookups import Lookups


class RecencyTracker(RowTracker):
    """Notes in which forward pass each row was looked up last, in 4 bytes a row.

    Of rows that were looked up in the same pass, the lowest are saved. It counts up to 2^31 - 1 passes.
    """

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        # what outlived an earlier worker goes on being older than what comes
        self._now = int(self._values.max())
        self._chosen_at: Final[dict[int, int]] = {}

    def see(self, lookups: Lookups) -> None:
        """Note the time."""
        self._now += 1
        self._values.scatter_(0, lookups.rows, self._now)

    def choose(self, table: int) -> Tensor:
        """The rows that were looked up last."""
        self._chosen_at[table] = self._now
        return top_rows(self.values(table), self._tables[table].budget)

    def confirm(self, table: int, rows: Tensor) -> None:
        """Rows that were not looked up since have nothing to save."""
        values = self.values(table)
        seen_at = values[rows]
        values[rows] = seen_at.where(seen_at > self._chosen_at[table], 0)
