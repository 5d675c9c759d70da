"""SSU: saves the rows in a bounded list of sub-sampled lookups."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import torch
from torch import Tensor

from cpr.priority.backlog import Backlog
from cpr.priority.tracker import TrackedGroup, Tracker
from cpr.shards.lookups import Lookups

FIRST_FACTOR: Final = 0x9E3779B1 - 2**32
SECOND_FACTOR: Final = 0x85EBCA6B - 2**32
HASH_BITS: Final = 31


class SubsampledTracker(Tracker):
    """Keeps a list of at most `budget` row ids for each table, in 4 bytes an id (CPR-SSU).

    Every `sampling_period`-th lookup of the module, in FBGEMM's order and over batches, is offered to the
    list of its table. The paper leaves open which id a new one replaces; here each id has one slot, as in a
    hash table without collision handling, and the last id of a slot stays. So an offer needs no sort and no
    search, only one scatter for all tables. In return ids are displaced before the list is full: as many
    different ids as slots fill 63 % of the slots, three times as many 95 %. Frequent ids return soon. If two
    ids of one pass have the same slot, one of them stays (on a GPU, any).

    A slot holds the row + 1; negative: a running save has taken the row, which was not offered since. If that
    save fails, ids displaced in the meantime are lost.
    """

    def __init__(self, group: TrackedGroup) -> None:
        super().__init__(group)
        self._period: Final = group.config.sampling_period
        budgets = [table.budget for table in group.tables]
        firsts = list(accumulate(budgets, initial=0))
        num_slots = firsts.pop()
        self._slots: Final = group.allocate(f"{group.name}-slots", torch.int32, num_slots + 1)
        self._lists: Final = [
            self._slots[first : first + budget] for first, budget in zip(firsts, budgets, strict=True)
        ]
        # tables that are not prioritised share the last slot, which is never read
        ranges = [
            (first, budget) if budget else (num_slots, 1)
            for first, budget in zip(firsts, budgets, strict=True)
        ]
        self._first = group.layout.by_feature([first for first, _ in ranges])
        self._size = group.layout.by_feature([size for _, size in ranges])
        self._phase = 0
        self._backlog: Final = Backlog(group, self._offer, self._period)

    @property
    def num_bytes(self) -> int:
        """Memory of the lists."""
        return self._slots.nbytes

    def see(self, lookups: Lookups) -> None:
        """Offer sampled lookups to the lists, now or before the lists are read."""
        self._backlog.see(lookups, self._phase)
        self._phase = (self._phase - lookups.ids.numel()) % self._period

    def choose(self, table: int) -> Tensor:
        """All rows in the list."""
        slots = self._list(table)
        slots.abs_().neg_()  # marks all as being saved; offers in the meantime are positive again
        return slots[slots != 0].neg_().sub_(1).to(torch.int64).sort().values

    def confirm(self, table: int, rows: Tensor) -> None:
        """Remove the saved ids, unless they were offered since."""
        self._list(table).clamp_(min=0)

    def take_back(self, table: int, rows: Tensor) -> None:
        """Keep the ids, unless they were displaced."""
        self._list(table).abs_()

    def forget(self, table: int, rows: Tensor | None) -> None:
        """Remove these ids."""
        slots = self._list(table)
        if rows is None:
            slots.zero_()
        else:
            slots[torch.isin(slots, (rows + 1).to(torch.int32))] = 0

    def state_dict(self) -> dict[str, Any]:
        """Position of the next sample."""
        return {"phase": self._phase}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Tracker.load_state_dict`."""
        self._phase = int(state["phase"])

    def _list(self, table: int) -> Tensor:
        self._backlog.sweep()
        return self._lists[table]

    def _offer(self, samples: Sequence[Lookups]) -> None:
        for sample in samples:
            ids = sample.ids.to(torch.int32)
            # scales the hash to the size of each list without a division
            slots = _hash(ids).mul_(sample.expand(self._size)).bitwise_right_shift_(HASH_BITS)
            self._slots.scatter_(0, slots.add_(sample.expand(self._first)), ids + 1)


def _hash(ids: Tensor) -> Tensor:
    """Pseudo-random numbers of `HASH_BITS` bits, int64, from int32 ids."""
    mixed = ids * FIRST_FACTOR
    mixed ^= mixed >> 15
    mixed *= SECOND_FACTOR
    return mixed.bitwise_and_(2**HASH_BITS - 1).to(torch.int64)
