"""SCAR: saves the rows whose values differ most from the saved ones (Qiao et al., ICML 2019)."""

from typing import ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.tracker import TrackedGroup, Tracker, top_rows

CHUNK_ELEMENTS: Final = 2**22
"""Elements of a table whose differences are in memory at a time."""


class ChangeTracker(Tracker):
    """Keeps a copy of the saved weights and compares exactly, in memory as large as the tables (CPR-SCAR).

    A row's distance is the L2 norm of the change of its weights, computed in fp32, without optimizer state.
    The copy of a rolling full save is that of its start. During a row save, chosen rows are held twice.
    """

    sees_lookups: ClassVar[bool] = False

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._saved: Final = {
            number: group.allocate(
                f"{group.name}-saved-{number}", table.shard.weights.dtype, table.shard.weights.numel()
            ).view(table.shard.weights.shape)
            for number, table in enumerate(group.tables)
            if table.shard is not None and table.budget
        }
        self._saving: Final[dict[int, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(saved.nbytes for saved in self._saved.values())

    def distances(self, table: int) -> Tensor:
        """Distance of each row from the saved one: fp32 `[num_rows]`."""
        live, saved = self._live(table), self._saved[table]
        found = torch.empty(saved.shape[0], device=saved.device)
        step = max(CHUNK_ELEMENTS // max(saved.shape[1], 1), 1)
        for begin in range(0, saved.shape[0], step):
            rows = slice(begin, begin + step)
            found[rows] = (live[rows].float() - saved[rows].float()).norm(dim=1)
        return found

    def choose(self, table: int) -> Tensor:
        """The rows with the largest distances; ties go to the lowest rows."""
        rows = top_rows(self.distances(table), self._tables[table].budget)
        self._saving[table] = self._live(table)[rows]
        return rows

    def confirm(self, table: int, rows: Tensor) -> None:
        """See `Tracker.confirm`."""
        self._saved[table][rows] = self._saving.pop(table)

    def take_back(self, table: int, rows: Tensor) -> None:
        """See `Tracker.take_back`."""
        del self._saving[table]

    def forget(self, table: int, rows: Tensor | None) -> None:
        """See `Tracker.forget`."""
        if rows is None:
            self._saved[table].copy_(self._live(table))
        else:
            self._saved[table][rows] = self._live(table)[rows]

    def _live(self, table: int) -> Tensor:
        shard = self._tables[table].shard
        assert shard is not None, "a table without rows has no budget"
        shard.flush()
        return shard.weights.detach()
