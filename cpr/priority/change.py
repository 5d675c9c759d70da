"""SCAR: the rows whose values are farthest from what is saved (Qiao et al., ICML 2019)."""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.top import top_rows
from cpr.priority.tracker import TrackedGroup
from cpr.shards.lookups import Lookups

CHUNK_ELEMENTS: Final = 2**22
"""Of a table, whose differences are in memory at a time."""


class ChangeTracker:
    """Keeps a copy of the weights as they were saved, and compares: exact, as large as the tables (CPR-SCAR).

    A row's distance is the L2 norm of the change of its weights, computed in fp32; its optimizer state does
    not count. In a rolling full save the copy is of the moment when it begins. While a row save is under way,
    the rows that it took are held once more.
    """

    sees_lookups: ClassVar[bool] = False

    def __init__(self, group: TrackedGroup) -> None:
        self._tables: Final = group.tables
        self._saved: Final = {
            number: group.allocate(
                f"{group.name}-saved-{number}", table.shard.weights.dtype, table.shard.weights.numel()
            ).view(table.shard.weights.shape)
            for number, table in enumerate(group.tables)
            if table.shard is not None and table.budget
        }
        self._under_way: Final[dict[int, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(saved.nbytes for saved in self._saved.values())

    def see(self, lookups: Lookups) -> None:
        """The values tell."""

    def distances(self, table: int) -> Tensor:
        """How far each row is from what is saved: fp32 `[num_rows]`."""
        live, saved = self._live(table), self._saved[table]
        found = torch.empty(saved.shape[0], device=saved.device)
        for rows in _chunks(saved):
            found[rows] = (live[rows].float() - saved[rows].float()).norm(dim=1)
        return found

    def choose(self, table: int) -> Tensor:
        """The rows that have changed most; of rows at equal distances, the lowest."""
        rows = top_rows(self.distances(table), self._tables[table].budget)
        self._under_way[table] = self._live(table)[rows]
        return rows

    def confirm(self, table: int, rows: Tensor) -> None:
        """What was copied when it was chosen is saved."""
        self._saved[table][rows] = self._under_way.pop(table)

    def take_back(self, table: int, rows: Tensor) -> None:
        """What was saved before still is."""
        del self._under_way[table]

    def forget(self, table: int, rows: Tensor | None) -> None:
        """What is live is saved."""
        if rows is None:
            self._saved[table].copy_(self._live(table))
        else:
            self._saved[table][rows] = self._live(table)[rows]

    def state_dict(self) -> dict[str, Any]:
        """Nothing: all is about single rows."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to go on from."""

    def _live(self, table: int) -> Tensor:
        shard = self._tables[table].shard
        assert shard is not None, "a table without rows has no budget"
        shard.flush()
        return shard.weights.detach()


def _chunks(table: Tensor) -> Iterator[slice]:
    num_rows, num_cols = table.shape
    step = max(CHUNK_ELEMENTS // max(num_cols, 1), 1)
    for begin in range(0, num_rows, step):
        yield slice(begin, begin + step)
