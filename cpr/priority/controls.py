"""Schemes for comparison: most recently used rows (MRU), all touched rows, random ones, in turn, and none."""

import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.tracker import RowTracker, TrackedGroup, TrackedTable, Tracker, top_rows
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


class NoTracker(Tracker):
    """Never saves a row of a prioritised table."""

    sees_lookups: ClassVar[bool] = False

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._device: Final = group.device

    def choose(self, table: int) -> Tensor:
        """No rows."""
        return torch.empty(0, dtype=torch.int64, device=self._device)


class RandomTracker(NoTracker):
    """Saves random rows, looked up or not; column-wise pieces of the same rows choose alike."""

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._generators: Final = {
            number: torch.Generator().manual_seed(_seed(group.config.seed, table))
            for number, table in enumerate(group.tables)
            if table.budget
        }

    def choose(self, table: int) -> Tensor:
        """As many random rows as the budget allows."""
        num_rows, budget = self._tables[table].num_rows, self._tables[table].budget
        drawn = torch.randperm(num_rows, generator=self._generators[table])[:budget]
        return drawn.sort().values.to(self._device)

    def state_dict(self) -> dict[str, Any]:
        """State of the generators."""
        return {str(number): generator.get_state() for number, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tracker.load_state_dict`."""
        for number, generator in self._generators.items():
            generator.set_state(state[str(number)])


class RoundRobinTracker(NoTracker):
    """Saves the rows of a table in turn."""

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._cursors: Final = [0] * len(group.tables)

    def choose(self, table: int) -> Tensor:
        """The next rows."""
        begin, budget = self._cursors[table], self._tables[table].budget
        rows = torch.arange(begin, begin + budget, device=self._device) % self._tables[table].num_rows
        return rows.sort().values

    def confirm(self, table: int, rows: Tensor) -> None:
        """Advance beyond the saved rows."""
        self._cursors[table] = (self._cursors[table] + rows.numel()) % self._tables[table].num_rows

    def state_dict(self) -> dict[str, Any]:
        """The next row of each table."""
        return {"cursors": list(self._cursors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tracker.load_state_dict`."""
        self._cursors[:] = state["cursors"]


def _seed(seed: int, table: TrackedTable) -> int:
    assert table.shard is not None, "a table without rows has no budget"
    # PyTorch's generator uses only the lowest 32 bits
    return zlib.crc32(f"{seed}/{table.shard.table_fqn}/r{table.shard.row_offset}".encode())
