"""What a scheme of priority has to do, and what it works on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from cpr.priority.config import PriorityConfig
from cpr.shards.lookups import LookupLayout, Lookups
from cpr.shards.shard import TableShard

Allocate = Callable[[str, torch.dtype, int], Tensor]
"""Makes a tracker's tensor `[numel]`: zeros, or what a tensor of this name holds that outlived its worker."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TrackedTable:
    """A table, or a piece of one, in an FBGEMM module."""

    shard: TableShard | None
    """None: a piece without rows."""
    first_row: int
    """In the module's joint row space."""
    num_rows: int
    budget: int
    """Rows that a save writes at most; 0: the table is not prioritised."""

    @property
    def joint_rows(self) -> slice:
        """Where the table's rows are in the joint row space."""
        return slice(self.first_row, self.first_row + self.num_rows)


@dataclass(frozen=True, eq=False, kw_only=True)
class TrackedGroup:
    """An FBGEMM module, which is what a tracker tracks: its tables stacked into one joint row space.

    So one pass over all that it looks up is enough, however many tables it has.
    """

    tables: Sequence[TrackedTable]
    layout: LookupLayout
    name: str
    """Of the group among those of the model."""
    config: PriorityConfig
    allocate: Allocate

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.layout.device

    @property
    def num_rows(self) -> int:
        """Joint rows."""
        return self.layout.first_rows[-1]


class Tracker(Protocol):
    """Says which rows of the tables of one FBGEMM module deserve saving.

    Tables are named by their number in the module. Rows are those of the piece that is there, from 0: int64
    on the table's device, ascending, without duplicates.

    A save takes its time, and may fail, or its worker may die meanwhile. So what it takes is marked as under
    way, and given up only when it is confirmed; whatever is looked up in between counts for the next save.
    """

    sees_lookups: ClassVar[bool]
    """Whether `see` is to be called; the tables of others need not be watched."""

    def __init__(self, group: TrackedGroup) -> None: ...

    @property
    def num_bytes(self) -> int:
        """Memory that it keeps for the tables' rows, without a `Backlog`, which is of one size for all."""
        ...

    def see(self, lookups: Lookups) -> None:
        """Training looks these up, and so changes them."""
        ...

    def choose(self, table: int) -> Tensor:
        """The rows to save now, as many as the table's budget allows."""
        ...

    def confirm(self, table: int, rows: Tensor) -> None:
        """What was chosen is saved as it was then."""
        ...

    def take_back(self, table: int, rows: Tensor) -> None:
        """What was chosen is not saved: it counts as if it had not been chosen."""
        ...

    def forget(self, table: int, rows: Tensor | None) -> None:
        """These rows (None: all) are now as they are saved; no save is under way."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What is not about single rows and goes on after a restart, such as a cursor; equal keys always."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        ...


class RowTracker:
    """A tracker with one number for each joint row; 0: there is nothing to save."""

    sees_lookups: ClassVar[bool] = True
    dtype: ClassVar[torch.dtype] = torch.int32

    def __init__(self, group: TrackedGroup) -> None:
        self._tables: Final = group.tables
        self._values: Final = group.allocate(f"{group.name}-rows", self.dtype, group.num_rows)

    @property
    def num_bytes(self) -> int:
        """Memory of the numbers."""
        return self._values.nbytes

    def values(self, table: int) -> Tensor:
        """The numbers of a table's rows, live: `[num_rows]`."""
        return self._values[self._tables[table].joint_rows]

    def take_back(self, table: int, rows: Tensor) -> None:
        """Nothing was given up yet."""

    def forget(self, table: int, rows: Tensor | None) -> None:
        """There is nothing to save of these rows."""
        values = self.values(table)
        if rows is None:
            values.zero_()
        else:
            values[rows] = 0

    def state_dict(self) -> dict[str, Any]:
        """Nothing: all is about single rows."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is nothing to go on from."""
