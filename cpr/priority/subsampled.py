"""SSU: a bounded list of sub-sampled used rows."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.backlog import Backlog
from cpr.priority.tracker import TrackedGroup
from cpr.shards.lookups import Lookups

FIRST_FACTOR: Final = 0x9E3779B1 - 2**32
SECOND_FACTOR: Final = 0x85EBCA6B - 2**32
HASH_BITS: Final = 31


class SubsampledTracker:
    """Keeps for each table at most as many row ids as a save may write, of 4 bytes each (CPR-SSU).

    Every `sampling_period`-th lookup of the module, in FBGEMM's order and counted on from batch to batch, is
    offered to the list of its table. A list holds no id twice. Which id makes room in a full one is not
    certain in what is known of the paper; here it is the one in the newcomer's place.

    For a list is a hash table in which each id has one place, and whoever comes last has it: offering needs
    no sort, no search and no look at what is there, only one scatter for all tables. The price is that ids
    are displaced before the list is full: as many different ids as there are places take 63 % of them, three
    times as many take 95 %. Frequent ids come back soon after they were displaced. Where two newcomers of one
    pass have the same place, one of them gets it (on a GPU, whichever).

    A place holds the row + 1; negative: a save that is under way took it, and it was not offered since. If
    that save fails, ids that were displaced meanwhile are gone.
    """

    sees_lookups: ClassVar[bool] = True

    def __init__(self, group: TrackedGroup) -> None:
        self._period: Final = group.config.sampling_period
        budgets = [table.budget for table in group.tables]
        firsts = list(accumulate(budgets, initial=0))
        num_slots = firsts.pop()
        self._slots: Final = group.allocate(f"{group.name}-slots", torch.int32, num_slots + 1)
        self._lists: Final = [
            self._slots[first : first + budget] for first, budget in zip(firsts, budgets, strict=True)
        ]
        # tables that are not prioritised share the one place at the end, which nobody reads
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
        """Offer every so manieth lookup to its list, now or before anybody asks for it."""
        self._backlog.see(lookups, self._phase)
        self._phase = (self._phase - lookups.ids.numel()) % self._period

    def choose(self, table: int) -> Tensor:
        """All rows in the list."""
        slots = self._list(table)
        slots.abs_().neg_()
        return slots[slots != 0].neg_().sub_(1).to(torch.int64).sort().values

    def confirm(self, table: int, rows: Tensor) -> None:
        """Ids that were not offered since go."""
        self._list(table).clamp_(min=0)

    def take_back(self, table: int, rows: Tensor) -> None:
        """Ids that were not displaced stay."""
        self._list(table).abs_()

    def forget(self, table: int, rows: Tensor | None) -> None:
        """These ids go."""
        slots = self._list(table)
        if rows is None:
            slots.zero_()
        else:
            slots[torch.isin(slots, (rows + 1).to(torch.int32))] = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the next sample is."""
        return {"phase": self._phase}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._phase = int(state["phase"])

    def _list(self, table: int) -> Tensor:
        self._backlog.sweep()
        return self._lists[table]

    def _offer(self, samples: Sequence[Lookups]) -> None:
        for sample in samples:
            ids = sample.ids.to(torch.int32)
            places = _hash(ids).mul_(sample.expand(self._size)).bitwise_right_shift_(HASH_BITS)
            self._slots.scatter_(0, places.add_(sample.expand(self._first)), ids + 1)


def _hash(ids: Tensor) -> Tensor:
    """Numbers of `HASH_BITS` bits, int64, that look random; `ids` int32."""
    mixed = ids * FIRST_FACTOR
    mixed ^= mixed >> 15
    mixed *= SECOND_FACTOR
    return mixed.bitwise_and_(2**HASH_BITS - 1).to(torch.int64)
