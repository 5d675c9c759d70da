"""The rows of large tables that a mirror in limited memory holds, as a priority tracker chooses them.

Of a large shard the mirror holds some slots, each with one row and the row's number. The owner alone decides
which row is in which slot. A row joins when it travels in a moment, whole and with its number, into an empty
slot or into that of a row that is no longer chosen: so the mirror never has parts of two rows in a slot, and
always tells by itself which rows it has.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from cpr.errors import NotEnoughMemoryError
from cpr.humanize import size_text
from cpr.mirror.changed_rows import Rows
from cpr.mirror.config import MirrorConfig
from cpr.mirror.rounding import Array
from cpr.priority import Prioritizer, PriorityConfig
from cpr.priority.covering import fused_tables, largest_tables, table_sizes
from cpr.shards.shard import TableShard

CHOICE_MOMENTS: Final = 256
"""Moments between choices; fewer at the start, when little is known: 1, 2, 4, ..."""
JOINING_BYTES: Final = 16 << 20
"""Rows that join in one moment; the others wait for the next."""
NUMBER_BYTES: Final = 8
"""Of a row's number in its slot."""
LEAST_SHARE: Final = 0.01
"""Of the rows of large tables: below it, nearly all lost rows would come from the checkpoint all the same."""


class ChosenRows:
    """Chooses which rows of a worker's shards its mirror holds, and in which slots.

    The owner remembers a slot (4 bytes) for each row of a large shard, besides what the tracker takes.

    Args:
        config: settings.
        shards: of the worker.
        model: with the tables.

    Raises:
        NotEnoughMemoryError: small tables, which are held whole, and `LEAST_SHARE` of the rows of large ones
            take more than `mirror.memory`.
    """

    def __init__(self, config: MirrorConfig, shards: Sequence[TableShard], model: nn.Module) -> None:
        self._shards, self._model = shards, model
        self._priority = PriorityConfig(scheme=config.scheme)
        self.num_slots: dict[int, int] = {}
        """Slots of each shard of which only some rows are held, by its number."""
        all_bytes = sum(shard.num_rows * shard.bytes_per_row for shard in shards)
        if config.rows == "priority" and all_bytes > config.memory_bytes:
            self._divide(config.memory_bytes)
        self._slots = {number: Slots(shards[number].num_rows, num) for number, num in self.num_slots.items()}
        self._prioritizer: Prioritizer | None = None
        self._moments, self._next_choice = 0, 1

    @property
    def share(self) -> float:
        """Share of the shards' bytes that is in rows which the mirror holds."""
        total = sum(shard.num_rows * shard.bytes_per_row for shard in self._shards)
        without = sum(
            (self._shards[number].num_rows - slots.num_rows) * self._shards[number].bytes_per_row
            for number, slots in self._slots.items()
        )
        return 1 - without / total if total else 1.0

    def watch(self) -> None:
        """Track lookups from now on, until `close`."""
        if self.num_slots:
            self._prioritizer = Prioritizer(self._model, self._priority, shards=self._shards)
            self._prioritizer.forget_all()

    def close(self) -> None:
        """Stop tracking."""
        if self._prioritizer is not None:
            self._prioritizer.close()

    def join(self) -> Rows:
        """Rows that join in the moment that is taken now; called once a moment."""
        self._moments += 1
        if self._prioritizer is not None and self._moments == self._next_choice:
            self._next_choice += min(self._moments, CHOICE_MOMENTS)
            self._choose(self._prioritizer)
        left, joining = JOINING_BYTES, dict[int, Tensor]()
        for number, slots in self._slots.items():
            row_bytes = self._shards[number].bytes_per_row
            rows = slots.join(left // row_bytes)
            left -= len(rows) * row_bytes
            if len(rows):
                joining[number] = torch.from_numpy(rows)
        return joining

    def join_again(self) -> None:
        """Let all rows join again: the mirror is empty."""
        for slots in self._slots.values():
            slots.join_again()

    def places(self, number: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those of some rows of a shard, int64 `[n]`, that the mirror holds, and their places in it."""
        return self._slots[number].places(rows) if number in self._slots else (rows, rows)

    def rows_at(self, number: int, places: Tensor) -> Tensor:
        """The rows at some places of a shard: int64 `[n]`."""
        return self._slots[number].rows_at(places) if number in self._slots else places

    def _divide(self, memory_bytes: int) -> None:
        """Give each prioritised table the same share of slots, as `Prioritizer` gives budgets."""
        large = largest_tables(table_sizes(self._model), self._priority.covering) & fused_tables(self._model)
        held = {
            number: shard.bytes_per_row + NUMBER_BYTES
            for number, shard in enumerate(self._shards)
            if shard.table_fqn in large and shard.num_rows
        }
        whole = sum(
            shard.num_rows * shard.bytes_per_row
            for number, shard in enumerate(self._shards)
            if number not in held
        )
        least = whole + sum(held.values())  # a slot each, because numbers of slots are rounded up
        every_row = sum(self._shards[number].num_rows * num_bytes for number, num_bytes in held.items())
        needed = least + LEAST_SHARE * every_row
        if memory_bytes <= needed:
            raise NotEnoughMemoryError(
                f"mirror.memory is {size_text(memory_bytes)}, and on this worker small tables, which are "
                f"mirrored whole, take {size_text(whole)}, and {LEAST_SHARE:.0%} of the rows of large ones, "
                f"the least that is of use, {size_text(needed - whole)}: give more, such as "
                f"{size_text(2 * needed)}, or set mirror.to=none"
            )
        self._priority = PriorityConfig(
            scheme=self._priority.scheme, ratio=min(1.0, (memory_bytes - least) / every_row)
        )
        self.num_slots = {
            number: math.ceil(self._priority.ratio * self._shards[number].num_rows) for number in held
        }

    def _choose(self, prioritizer: Prioritizer) -> None:
        chosen = prioritizer.rows_to_save()
        prioritizer.confirm()
        for number, slots in self._slots.items():
            shard = self._shards[number]
            slots.choose((chosen[shard.name] - shard.row_offset).numpy())


class Slots:
    """Which row of a shard is in which slot of its mirror."""

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self._row_of = np.full(num_slots, -1, np.int64)
        self._slot_of = np.full(num_rows, -1, np.int32)
        self._waiting = self._open = np.empty(0, np.int64)
        self.num_rows = 0
        """Rows that have a slot."""

    def choose(self, rows: Array) -> None:
        """Let these rows, int64 `[n]`, at most one for each slot, join as `join` is called.

        They take empty slots first, and then those of rows that are not chosen any more, which stay until
        then.
        """
        slots = self._slot_of[rows]
        can_leave = np.ones(len(self._row_of), bool)
        can_leave[slots[slots >= 0]] = False
        is_empty = self._row_of < 0
        self._open = np.concatenate([np.flatnonzero(is_empty), np.flatnonzero(can_leave & ~is_empty)])
        self._waiting = rows[slots < 0]

    def join(self, limit: int) -> Array:
        """Give slots to at most so many of the rows that wait, and return them."""
        rows, self._waiting = np.sort(self._waiting[:limit]), self._waiting[limit:]
        slots, self._open = self._open[: len(rows)], self._open[len(rows) :]
        leaving = self._row_of[slots]
        leaving = leaving[leaving >= 0]
        self._slot_of[leaving] = -1
        self._row_of[slots] = rows
        self._slot_of[rows] = slots
        self.num_rows += len(rows) - len(leaving)
        return rows

    def join_again(self) -> None:
        """Take all slots back, and let the same rows wait, those that are chosen first."""
        can_leave = np.zeros(len(self._row_of), bool)
        can_leave[self._open] = True
        rows = np.concatenate([self._waiting, self._row_of[~can_leave], self._row_of[self._open]])
        self._waiting = rows[rows >= 0][: len(self._row_of)]
        self._open = np.arange(len(self._row_of))
        self._row_of.fill(-1)
        self._slot_of.fill(-1)
        self.num_rows = 0

    def places(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the rows that have a slot, and their slots: int64 `[n]` each."""
        slots = self._slot_of[rows.numpy()]
        has_slot = slots >= 0
        return rows[torch.from_numpy(has_slot)], torch.from_numpy(slots[has_slot].astype(np.int64))

    def rows_at(self, slots: Tensor) -> Tensor:
        """The rows in these slots: int64 `[n]`."""
        return torch.from_numpy(self._row_of[slots.numpy()])
