"""Schemes that know nothing of training, to compare with: random rows, one after the other, and none."""

import zlib
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.tracker import TrackedGroup, TrackedTable
from cpr.shards.lookups import Lookups


class NoTracker:
    """Never saves a row of a prioritised table."""

    sees_lookups: ClassVar[bool] = False
    num_bytes: ClassVar[int] = 0

    def __init__(self, group: TrackedGroup) -> None:
        self._tables: Final = group.tables
        self._device: Final = group.device

    def see(self, lookups: Lookups) -> None:
        """It does not matter."""

    def choose(self, table: int) -> Tensor:
        """No rows."""
        return torch.empty(0, dtype=torch.int64, device=self._device)

    def confirm(self, table: int, rows: Tensor) -> None:
        """It does not matter."""

    def take_back(self, table: int, rows: Tensor) -> None:
        """It does not matter."""

    def forget(self, table: int, rows: Tensor | None) -> None:
        """It does not matter."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to go on from."""


class RandomTracker(NoTracker):
    """Saves rows drawn anew each time, looked up or not.

    Where several pieces have the same rows, as columns of one table, the same are drawn of each.
    """

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._generators: Final = {
            number: torch.Generator().manual_seed(_seed(group.config.seed, table))
            for number, table in enumerate(group.tables)
            if table.budget
        }

    def choose(self, table: int) -> Tensor:
        """As many rows as the budget allows."""
        num_rows, budget = self._tables[table].num_rows, self._tables[table].budget
        drawn = torch.randperm(num_rows, generator=self._generators[table])[:budget]
        return drawn.sort().values.to(self._device)

    def state_dict(self) -> dict[str, Any]:
        """The generators."""
        return {str(number): generator.get_state() for number, generator in self._generators.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Draw on from there."""
        for number, generator in self._generators.items():
            generator.set_state(state[str(number)])


class RoundRobinTracker(NoTracker):
    """Saves one piece of a table after the other, and then from the beginning."""

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._cursors: Final = [0] * len(group.tables)

    def choose(self, table: int) -> Tensor:
        """The next rows."""
        begin, budget = self._cursors[table], self._tables[table].budget
        rows = torch.arange(begin, begin + budget, device=self._device) % self._tables[table].num_rows
        return rows.sort().values

    def confirm(self, table: int, rows: Tensor) -> None:
        """Go on to the piece after."""
        self._cursors[table] = (self._cursors[table] + rows.numel()) % self._tables[table].num_rows

    def state_dict(self) -> dict[str, Any]:
        """Where each table's next piece begins."""
        return {"cursors": list(self._cursors)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._cursors[:] = state["cursors"]


def _seed(seed: int, table: TrackedTable) -> int:
    assert table.shard is not None, "a table without rows has no budget"
    # PyTorch's generator heeds the lowest 32 bits alone
    return zlib.crc32(f"{seed}/{table.shard.table_fqn}/r{table.shard.row_offset}".encode())
