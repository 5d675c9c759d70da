"""Base classes of trackers, which choose the rows that a row save writes, and the tables they track."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.config import PriorityConfig
from cpr.shards.lookups import LookupLayout, Lookups
from cpr.shards.shard import TableShard

Allocate = Callable[[str, torch.dtype, int], Tensor]
"""Allocates a tracker's tensor `[numel]` by name: zeros, or the surviving tensor of a dead worker."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrackedTable:
    """A table, or a piece of one, in an FBGEMM module."""

    shard: TableShard | None
    """None: a piece without rows."""
    first_row: int
    """In the module's joint row space."""
    num_rows: int
    budget: int
    """Largest number of rows in a save; 0: the table is not prioritised."""

    @property
    def joint_rows(self) -> slice:
        """The table's rows in the joint row space."""
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrackedGroup:
    """An FBGEMM module with its tables stacked into one joint row space.

    A tracker tracks one group, so that one pass over all lookups is enough, however many tables there are.
    """

    tables: Sequence[TrackedTable]
    layout: LookupLayout
    name: str
    """Unique among the groups of the model."""
    config: PriorityConfig
    allocate: Allocate

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self.layout.device

    @property
    def num_rows(self) -> int:
        """Number of joint rows."""
        return self.layout.first_rows[-1]


class Tracker:
    """Chooses which rows of the tables of one FBGEMM module a row save writes.

    Tables are given by their number in the module. Rows are those of the piece in it, from 0: int64 on the
    table's device, ascending, without duplicates.

    A save takes time, may fail, and its worker may die. So chosen rows are only marked as being saved, and
    dropped once the save is confirmed; lookups in the meantime count for the next save.
    """

    sees_lookups: ClassVar[bool] = True
    """Whether `see` is to be called."""

    def __init__(self, group: TrackedGroup) -> None:
        self._tables: Final = group.tables

    @property
    def num_bytes(self) -> int:
        """Memory for the tables' rows, without a `Backlog`, whose size is constant."""
        return 0

    def wants_pass(self) -> bool:
        """Whether `see` is to be called with the lookups of this pass; asked once a pass, in order."""
        return True

    def see(self, lookups: Lookups) -> None:
        """Note lookups of training, which change rows."""

    def choose(self, table: int) -> Tensor:
        """The rows to save now, within the table's budget."""
        raise NotImplementedError

    def confirm(self, table: int, rows: Tensor) -> None:
        """Drop the chosen rows: they are saved as they were when chosen."""

    def take_back(self, table: int, rows: Tensor) -> None:
        """Keep the chosen rows, as their save failed or was skipped."""

    def forget(self, table: int, rows: Tensor | None) -> None:
        """Drop rows (None: all) that equal the saved ones now; called while no save is running."""

    def state_dict(self) -> dict[str, Any]:
        """State that does not belong to single rows and survives a restart, with constant keys."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of `state_dict`."""


class RowTracker(Tracker):
    """A tracker with one number for each joint row; 0: nothing to save."""

    dtype: ClassVar[torch.dtype] = torch.int32

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._values: Final = group.allocate(f"{group.name}-rows", self.dtype, group.num_rows)

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return self._values.nbytes

    def values(self, table: int) -> Tensor:
        """The live numbers of a table's rows: `[num_rows]`."""
        return self._values[self._tables[table].joint_rows]

    def forget(self, table: int, rows: Tensor | None) -> None:
        """See `Tracker.forget`."""
        values = self.values(table)
        if rows is None:
            values.zero_()
        else:
            values[rows] = 0


def top_rows(values: Tensor, budget: int) -> Tensor:
    """The at most `budget` rows with the highest positive values, in O(N); ties go to the lowest rows.

    Takes `[num_rows]`; returns ascending rows, int64 `[n]`, on the same device.
    """
    rows = torch.nonzero(values > 0).view(-1)
    num = rows.numel()
    if num <= budget:
        return rows
    found = values[rows]
    threshold = found.kthvalue(num - budget + 1).values
    is_above = found > threshold
    at_threshold = torch.nonzero(found == threshold).view(-1)
    is_above[at_threshold[: budget - int(is_above.sum())]] = True
    return rows[is_above]
