"""Incremental saving, to compare with: all rows that were looked up since they were last saved."""

from typing import ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.tracker import RowTracker
from cpr.shards.lookups import Lookups

TOUCHED: Final = 1
UNDER_WAY: Final = 2
"""Touched, and not since a save took the row."""


class TouchedTracker(RowTracker):
    """Notes in one byte a row whether it was looked up. Whatever the budget, it saves all of those."""

    dtype: ClassVar[torch.dtype] = torch.uint8

    def see(self, lookups: Lookups) -> None:
        """Note it."""
        self._values.scatter_(0, lookups.rows, TOUCHED)

    def choose(self, table: int) -> Tensor:
        """All rows that were looked up."""
        values = self.values(table)
        rows = torch.nonzero(values).view(-1)
        values[rows] = UNDER_WAY
        return rows

    def confirm(self, table: int, rows: Tensor) -> None:
        """Rows that were not looked up since have nothing to save."""
        values = self.values(table)
        now = values[rows]
        values[rows] = now.where(now == TOUCHED, 0)
