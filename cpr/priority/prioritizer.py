"""`Prioritizer` chooses which rows of each table a row save writes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.priority.change import ChangeTracker
from cpr.priority.config import PriorityConfig, Scheme
from cpr.priority.controls import (
    NoTracker,
    RandomTracker,
    RecencyTracker,
    RoundRobinTracker,
    TouchedTracker,
)
from cpr.priority.covering import fused_tables, largest_tables, table_sizes
from cpr.priority.evictions import EvictionTracker
from cpr.priority.frequency import FrequencyTracker
from cpr.priority.subsampled import SubsampledTracker
from cpr.priority.tracker import Allocate, TrackedGroup, TrackedTable, Tracker
from cpr.shards import find_shards, table_groups
from cpr.shards.groups import Hooks, TableGroup
from cpr.shards.lookups import LookupLayout, Lookups, watch_lookups
from cpr.shards.row_columns import row_columns
from cpr.shards.shard import TableShard

TRACKERS: Final[Mapping[Scheme, type[Tracker]]] = {
    "mfu": FrequencyTracker,
    "ssu": SubsampledTracker,
    "scar": ChangeTracker,
    "random": RandomTracker,
    "mru": RecencyTracker,
    "touched": TouchedTracker,
    "round_robin": RoundRobinTracker,
    "never": NoTracker,
}


class Prioritizer:
    """Tracks training, and chooses the rows of this rank that a row save writes.

    A row save, on all ranks::

        save = checkpointer.save_rows(prioritizer.rows_to_save())
        ...  # later, when it is committed:
        prioritizer.confirm()  # or take_back(), if it was skipped or has failed

    A full save starts with `begin_full_save`. Call all methods in the training thread, between steps.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it.
        config: of priority saving.
        optimizers: ordinary optimizers that update tables, as for `Checkpointer`.
        shards: of the model, if known already (`Checkpointer.shards`).
        allocate: allocates the trackers' tensors; None: zeros on the tables' device. With the surviving
            memory of a dead worker with the same tables and config, its tracking continues.

    Raises:
        ValueError: the model holds tables in an unsupported way.
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
        """Names of the prioritised tables; the same on all ranks."""
        self._tracked_shards: dict[str, list[tuple[Tracker, int]]] = {}
        """The trackers of each prioritised shard, and the shard's number in its group."""
        self._trackers: dict[str, Tracker] = {}
        self._tracked: dict[str, list[tuple[str, int, int]]] = {}
        """Tables of each tracker: for each piece, the shard's name, its rows and its budget."""
        self._hooks = Hooks()
        watched: list[tuple[TableGroup, Tracker]] = []
        for number, group in enumerate(table_groups(model)):
            tracker = self._track(number, group, allocate)
            if tracker is not None and tracker.sees_lookups:
                watched.append((group, tracker))
        # allocated like the trackers' memory, which may survive this worker, to tell whether it is valid
        flag = (allocate or _zeros(torch.device("cpu")))(f"priority-{config.scheme}-complete", torch.int32, 1)
        self._complete = flag
        self._running: Literal["rows", "full"] | None = None
        self._taken: dict[str, list[Tensor]] = {}
        """Rows that each tracker of a shard has chosen for the running save."""
        self._seen_by = [tracker for _, tracker in watched]
        self._hooks.enter_context(watch_lookups([group for group, _ in watched], self._see, self._wants_pass))

    @property
    def is_complete(self) -> bool:
        """Whether the trackers know all rows that have changed since their last save; may differ by rank.

        `FrequencyTracker` may lack some that are looked up too seldom to be chosen. If they do not know, as
        in a new run, the next save must be a full one.
        """
        return bool(self._complete.item())

    @property
    def tracker_bytes(self) -> int:
        """Memory of the trackers for the rows of this rank (`Tracker.num_bytes`)."""
        trackers = {tracker for each in self._tracked_shards.values() for tracker, _ in each}
        return sum(tracker.num_bytes for tracker in trackers)

    def rows_to_save(self) -> dict[str, Tensor]:
        """Start a row save: the rows to write now, for `Checkpointer.save_rows`.

        From now until `confirm` or `take_back` further lookups count for the next save.

        Returns:
            Row ids by name of the shard, int64 on the CPU, ascending, without duplicates: the chosen rows of
            prioritised tables, and all of their rows whose ids were evicted; all rows of other tables.

        Raises:
            ValueError: another save is running, or a full one must come first.
        """
        self._check_idle()
        if not self.is_complete:
            raise ValueError(
                "a full save must come first: it is not known which rows have changed since the last one"
            )
        self._taken = {
            name: [tracker.choose(table) for tracker, table in trackers]
            for name, trackers in self._tracked_shards.items()
        }
        self._running = "rows"
        return {
            name: _united(self._taken[name]).cpu() + shard.row_offset
            if name in self._taken
            else torch.arange(shard.row_offset, shard.row_offset + shard.num_rows)
            for name, shard in self._shards.items()
        }

    def begin_full_save(self) -> None:
        """Start a full save, of the rows as they are now, or a little later if it is rolling.

        It runs until `confirm` or `take_back`. If it fails, `is_complete` is False.

        Raises:
            ValueError: another save is running.
        """
        self.doubt()  # first, as memory that survives a worker's death below must count as invalid
        self._forget_rows()
        self._running = "full"

    def confirm(self) -> None:
        """End the running save: it is committed.

        Raises:
            ValueError: no save is running.
        """
        for tracker, table, rows in self._end_save():
            tracker.confirm(table, rows)
        self._complete.fill_(1)

    def take_back(self) -> None:
        """End the running save: it was skipped or has failed, and all rows keep their priority.

        Raises:
            ValueError: no save is running.
        """
        for tracker, table, rows in self._end_save():
            tracker.take_back(table, rows)

    def forget_all(self) -> None:
        """Drop all rows of this rank, which were just loaded and equal the saved ones.

        Raises:
            ValueError: a save is running.
        """
        self._check_idle()
        self._forget_rows()
        self._complete.fill_(1)

    def doubt(self) -> None:
        """Require a full save next, as the trackers may not know all changed rows.

        Raises:
            ValueError: a save is running.
        """
        self._check_idle()
        self._complete.zero_()

    def forget(self, shard_name: str, ranges: Sequence[tuple[int, int]] | None = None) -> None:
        """Drop some rows, which were just reset to the saved ones.

        Args:
            shard_name: `TableShard.name`.
            ranges: half-open ranges of row ids of the table; None: the whole shard.

        Raises:
            ValueError: a save is running, or this rank does not hold the shard or the rows.
        """
        self._check_idle()
        if shard_name not in self._shards:
            raise ValueError(f"this rank has no shard {shard_name!r}; it has {', '.join(self._shards)}")
        shard = self._shards[shard_name]
        rows = None if ranges is None else [_local_rows(shard, begin, end) for begin, end in ranges]
        if rows != []:
            for tracker, table in self._tracked_shards.get(shard_name, ()):
                tracker.forget(table, None if rows is None else torch.unique(torch.cat(rows)))

    def close(self) -> None:
        """Stop tracking."""
        self._hooks.remove()

    def __enter__(self) -> Self:
        """The prioritizer, closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """State of the trackers besides that of single rows; differs by rank."""
        return {
            "scheme": self._config.scheme,
            "tracked": dict(self._tracked),
            "trackers": {name: tracker.state_dict() for name, tracker in self._trackers.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`; trackers with another scheme or other tables start over."""
        if state["scheme"] != self._config.scheme:
            return
        for name, tracker in self._trackers.items():
            if state["tracked"].get(name) == self._tracked[name]:
                tracker.load_state_dict(state["trackers"][name])

    def _wants_pass(self, number: int) -> bool:
        return self._seen_by[number].wants_pass()

    def _see(self, number: int, lookups: Lookups) -> None:
        self._seen_by[number].see(lookups)

    def _track(self, number: int, group: TableGroup, allocate: Allocate | None) -> Tracker | None:
        """Make the tracker of an FBGEMM module; None without prioritised rows."""
        layout = LookupLayout.of(group)
        # first_rows also has the end
        pairs = zip(group.tables, layout.first_rows, strict=False)
        tables = [self._tracked_table(table, first) for table, first in pairs]
        if not any(table.budget for table in tables):
            return None
        name = f"priority-{self._config.scheme}-{number}"
        tracked = TrackedGroup(
            tables=tables,
            layout=layout,
            name=name,
            config=self._config,
            allocate=allocate or _zeros(layout.device),
        )
        tracker = TRACKERS[self._config.scheme](tracked)
        added = row_columns(group.emb_module)
        evictions = EvictionTracker(tracked) if added else None
        self._trackers[name] = tracker
        self._tracked[name] = [
            ("" if table.shard is None else table.shard.name, table.num_rows, table.budget)
            for table in tables
        ]
        for number_in_group, table in enumerate(tables):
            if table.budget and table.shard is not None:
                of_shard = self._tracked_shards[table.shard.name] = [(tracker, number_in_group)]
                if evictions is not None and number_in_group in added:
                    of_shard.append((evictions, number_in_group))
                    self._hooks.enter_context(evictions.watch(number_in_group, added[number_in_group]))
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
        for trackers in self._tracked_shards.values():
            for tracker, table in trackers:
                tracker.forget(table, None)

    def _check_idle(self) -> None:
        if self._running is not None:
            raise ValueError("a save is running: confirm() or take_back() it first")

    def _end_save(self) -> list[tuple[Tracker, int, Tensor]]:
        """The trackers, and the rows of a table that each has chosen for the save."""
        if self._running is None:
            raise ValueError("no save is running: rows_to_save() or begin_full_save() comes first")
        self._running, taken, self._taken = None, self._taken, {}
        return [
            (tracker, table, rows)
            for name, chosen in taken.items()
            for (tracker, table), rows in zip(self._tracked_shards[name], chosen, strict=True)
        ]


def _zeros(device: torch.device) -> Allocate:
    def allocate(name: str, dtype: torch.dtype, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=device)

    return allocate


def _united(chosen: Sequence[Tensor]) -> Tensor:
    return chosen[0] if len(chosen) == 1 else torch.unique(torch.cat(list(chosen)))


def _local_rows(shard: TableShard, begin: int, end: int) -> Tensor:
    if not shard.row_offset <= begin <= end <= shard.row_offset + shard.num_rows:
        raise ValueError(
            f"rows {begin} to {end - 1} were named of {shard.name}, which holds rows {shard.row_offset} to "
            f"{shard.row_offset + shard.num_rows - 1}"
        )
    device = shard.weights.device
    return torch.arange(begin - shard.row_offset, end - shard.row_offset, device=device)
