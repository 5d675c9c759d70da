"""`Prioritizer`: what saving holds to know which rows to save."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.priority.config import PriorityConfig
from cpr.priority.covering import fused_tables, largest_tables, table_sizes
from cpr.priority.schemes import TRACKERS
from cpr.priority.tracker import Allocate, TrackedGroup, TrackedTable, Tracker
from cpr.shards import find_shards, table_groups
from cpr.shards.groups import TableGroup
from cpr.shards.lookups import LookupLayout, Lookups, watch_lookups
from cpr.shards.shard import TableShard


@dataclass(frozen=True, eq=False)
class _Place:
    """Where the tracker of a prioritised shard is, and which table the shard is there."""

    tracker: Tracker
    table: int


class Prioritizer:
    """Tracks training, and says which rows of this rank a row save should write.

    A save goes like this, on all ranks alike::

        save = checkpointer.save_rows(prioritizer.rows_to_save())
        ...  # later, when it is committed:
        prioritizer.confirm()  # or take_back(), when it was skipped or has failed

    and a full one begins with `begin_full_save`. All calls are made by the thread that trains, between steps.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it.
        config: which rows.
        optimizers: ordinary optimizers that update tables, as for `Checkpointer`.
        shards: of the model, where they are at hand (`Checkpointer.shards`).
        allocate: makes the trackers' tensors; None: zeros beside the tables. One that returns the memory that
            an earlier worker with the same tables and config had by that name goes on where that one was.

    Raises:
        ValueError: the model holds tables in a way that is not supported; the message says which.
    """

    def __init__(
        self,
        model: nn.Module,
        config: PriorityConfig,
        optimizers: Sequence[Optimizer] = (),
        *,
        shards: Sequence[TableShard] | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        self._shards = {
            shard.name: shard for shard in (find_shards(model, optimizers) if shards is None else shards)
        }
        self._config = config
        self.prioritised = largest_tables(table_sizes(model), config.covering) & fused_tables(model)
        """Names of the tables that are not saved whole; the same on all ranks."""
        self._places: dict[str, _Place] = {}
        self._trackers: dict[str, Tracker] = {}
        self._tracked: dict[str, list[tuple[str, int, int]]] = {}
        """What each tracker tracks: of each piece, the shard's name, its rows and the budget."""
        watched: list[tuple[TableGroup, Tracker]] = []
        for number, group in enumerate(table_groups(model)):
            tracker = self._track(number, group, allocate)
            if tracker is not None and tracker.sees_lookups:
                watched.append((group, tracker))
        # says in the trackers' own memory, which may outlive this worker, that the rest of it counts
        flag = (allocate or _zeros(torch.device("cpu")))(f"priority-{config.scheme}-complete", torch.int32, 1)
        self._complete = flag
        self._under_way: Literal["rows", "full"] | None = None
        self._taken: dict[str, Tensor] = {}
        self._seen_by = [tracker for _, tracker in watched]
        self._hooks = watch_lookups([group for group, _ in watched], self._see)

    @property
    def is_complete(self) -> bool:
        """Whether the trackers know of all rows that have changed since they were saved.

        Where not, as in a new run, the next save must be a full one. It may differ by rank.
        """
        return bool(self._complete.item())

    @property
    def tracker_bytes(self) -> int:
        """Memory that the trackers keep for the rows of this rank (`Tracker.num_bytes`)."""
        return sum(tracker.num_bytes for tracker in self._trackers.values())

    def rows_to_save(self) -> dict[str, Tensor]:
        """The rows that a row save should write now, for `Checkpointer.save_rows`.

        Until `confirm` or `take_back` they are under way: further lookups count for the save after.

        Returns:
            Row ids of the table, int64 on the CPU, ascending, without duplicates, by name of the shard: of
            prioritised tables those that the scheme chooses, of others all.

        Raises:
            ValueError: a save is under way, or a full one must come first.
        """
        self._check_idle()
        if not self.is_complete:
            raise ValueError(
                "a full save must come first: it is not known which rows have changed since the last one"
            )
        self._taken = {name: place.tracker.choose(place.table) for name, place in self._places.items()}
        self._under_way = "rows"
        return {
            name: self._taken[name].cpu() + shard.row_offset
            if name in self._taken
            else torch.arange(shard.row_offset, shard.row_offset + shard.num_rows)
            for name, shard in self._shards.items()
        }

    def begin_full_save(self) -> None:
        """A full save begins with the rows as they are now, or a little later where it is rolling.

        Until `confirm` or `take_back` it is under way. When it fails, `is_complete` is False.

        Raises:
            ValueError: a save is under way.
        """
        self.doubt()  # first: whatever outlives a worker that dies half-way must not be believed
        self._forget_rows()
        self._under_way = "full"

    def confirm(self) -> None:
        """The save that was under way is committed.

        Raises:
            ValueError: none was.
        """
        for name, rows in self._end_save().items():
            place = self._places[name]
            place.tracker.confirm(place.table, rows)
        self._complete.fill_(1)

    def take_back(self) -> None:
        """The save that was under way was skipped or has failed: no row loses its priority by that.

        Raises:
            ValueError: none was.
        """
        for name, rows in self._end_save().items():
            place = self._places[name]
            place.tracker.take_back(place.table, rows)

    def forget_all(self) -> None:
        """All rows of this rank are as they are saved: they were just loaded.

        Raises:
            ValueError: a save is under way.
        """
        self._check_idle()
        self._forget_rows()
        self._complete.fill_(1)

    def doubt(self) -> None:
        """The trackers do not know of all rows that have changed: a full save must come next.

        Raises:
            ValueError: a save is under way.
        """
        self._check_idle()
        self._complete.zero_()

    def forget(self, shard_name: str, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Some rows are as they are saved: they were just set back to that.

        Args:
            shard_name: `TableShard.name`.
            ranges: row ids of the table, each from the first to before the last; None: the whole shard.

        Raises:
            ValueError: a save is under way, or this rank has no such shard or not these rows of it.
        """
        self._check_idle()
        if shard_name not in self._shards:
            raise ValueError(f"this rank has no shard {shard_name!r}; it has {', '.join(self._shards)}")
        shard = self._shards[shard_name]
        rows = None if ranges is None else [_local_rows(shard, begin, end) for begin, end in ranges]
        place = self._places.get(shard_name)
        if place is not None and rows is None:
            place.tracker.forget(place.table, None)
        elif place is not None and rows:
            place.tracker.forget(place.table, torch.unique(torch.cat(rows)))

    def close(self) -> None:
        """Watch no longer."""
        self._hooks.remove()

    def __enter__(self) -> Self:
        """The prioritizer, closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """What of the trackers is not about single rows; it differs by rank."""
        return {
            "scheme": self._config.scheme,
            "tracked": dict(self._tracked),
            "trackers": {name: tracker.state_dict() for name, tracker in self._trackers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; trackers of another scheme or of tables laid out otherwise begin anew."""
        if state["scheme"] != self._config.scheme:
            return
        for name, tracker in self._trackers.items():
            if state["tracked"].get(name) == self._tracked[name]:
                tracker.load_state_dict(state["trackers"][name])

    def _see(self, number: int, lookups: Lookups) -> None:
        self._seen_by[number].see(lookups)

    def _track(self, number: int, group: TableGroup, allocate: Allocate | None) -> Tracker | None:
        """The tracker of an FBGEMM module; None if it has no prioritised rows."""
        layout = LookupLayout.of(group)
        tables = [
            self._tracked_table(table, first)
            for table, first in zip(group.tables, layout.first_rows, strict=False)  # one more: the end
        ]
        if not any(table.budget for table in tables):
            return None
        name = f"priority-{self._config.scheme}-{number}"
        tracker = TRACKERS[self._config.scheme](
            TrackedGroup(
                tables=tables,
                layout=layout,
                name=name,
                config=self._config,
                allocate=allocate or _zeros(layout.device),
            )
        )
        self._trackers[name] = tracker
        self._tracked[name] = [
            ("" if table.shard is None else table.shard.name, table.num_rows, table.budget)
            for table in tables
        ]
        for place, table in enumerate(tables):
            if table.budget and table.shard is not None:
                self._places[table.shard.name] = _Place(tracker, place)
        return tracker

    def _tracked_table(self, table: TableShard, first_row: int) -> TrackedTable:
        num_rows = table.weights.shape[0]
        is_prioritised = table.table_fqn in self.prioritised
        return TrackedTable(
            shard=self._shards.get(table.name),
            first_row=first_row,
            num_rows=num_rows,
            budget=math.ceil(self._config.ratio * num_rows) if is_prioritised else 0,
        )

    def _forget_rows(self) -> None:
        for place in self._places.values():
            place.tracker.forget(place.table, None)

    def _check_idle(self) -> None:
        if self._under_way is not None:
            raise ValueError("a save is under way: confirm() it or take_back() what it took first")

    def _end_save(self) -> dict[str, Tensor]:
        if self._under_way is None:
            raise ValueError("no save is under way: rows_to_save() or begin_full_save() comes first")
        self._under_way, taken, self._taken = None, self._taken, {}
        return taken


def _zeros(device: torch.device) -> Allocate:
    def allocate(name: str, dtype: torch.dtype, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    return allocate


def _local_rows(shard: TableShard, begin: int, end: int) -> Tensor:
    if not shard.row_offset <= begin <= end <= shard.row_offset + shard.num_rows:
        raise ValueError(
            f"rows {begin} to {end - 1} were named of {shard.name}, which holds rows {shard.row_offset} to "
            f"{shard.row_offset + shard.num_rows - 1}"
        )
    device = shard.weights.device
    return torch.arange(begin - shard.row_offset, end - shard.row_offset, device=device)
