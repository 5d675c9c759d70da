"""SSU: a bounded list of sub-sampled used rows."""

from collections.abc import Mapping
from itertools import accumulate
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from cpr.priority.tracker import TrackedGroup
from cpr.shards.lookups import Lookups

FIRST_FACTOR: Final = 0x9E3779B1 - 2**32
SECOND_FACTOR: Final = 0x85EBCA6B - 2**32
HASH_BITS: Final = 31


class SubsampledTracker:
    """Keeps for each table at most as many row ids as a save may write, of 4 bytes each (CPR-SSU).

    Every `sampling_period`-th lookup of the module, in FBGEMM's order and counted on from batch to batch, is
    offered to the list of its table. A list holds no id twice. Which id makes room in a full one is not
    certain in what is known of the paper; here it is one of the two that the newcomer's hash points at.

    A list is a hash set in one piece of int32 memory: an id has two slots, a number of slots from the front
    and the same from the back. It takes the first that is free, or by turns the place of the id in the first
    or the second. So offering needs neither a sort nor a loop over ids, only two gathers and one scatter for
    all tables, and ids may be displaced a little before the last slot is taken. Where two newcomers of one
    pass want the same slot, one of them gets it (on a GPU, whichever).

    A slot holds the row + 1; negative: a save that is under way took it, and it was not offered since.
    Newcomers take such slots as if they were free; if that save fails, the ids that were there are gone.
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
        # tables that are not prioritised share the one slot at the end, which nobody reads
        ranges = [
            (first, budget) if budget else (num_slots, 1)
            for first, budget in zip(firsts, budgets, strict=True)
        ]
        self._first = group.layout.by_feature([first for first, _ in ranges])
        self._size = group.layout.by_feature([size for _, size in ranges])
        self._ends = group.layout.by_feature([2 * first + size - 1 for first, size in ranges])
        self._phase = 0
        self._passes = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the lists."""
        return self._slots.nbytes

    def see(self, lookups: Lookups) -> None:
        """Offer every so manieth lookup to its list."""
        sample = lookups.every(self._period, self._phase)
        self._phase = (self._phase - lookups.ids.numel()) % self._period
        self._passes += 1
        ids = sample.ids.to(torch.int32)
        front = (_hash(ids).mul_(sample.expand(self._size)) >> HASH_BITS).add_(sample.expand(self._first))
        back = sample.expand(self._ends) - front
        at_front, at_back = self._slots.index_select(0, front), self._slots.index_select(0, back)
        keys = ids.add_(1)
        to_back = (at_front > 0).logical_and_(at_front.abs_() != keys)
        if self._passes % 2:
            to_back &= at_back <= 0
        to_back |= at_back.abs_() == keys
        self._slots.scatter_(0, back.where(to_back, front), keys)

    def choose(self, table: int) -> Tensor:
        """All rows in the list."""
        slots = self._lists[table]
        slots.abs_().neg_()
        return slots[slots != 0].neg_().sub_(1).to(torch.int64).sort().values

    def confirm(self, table: int, rows: Tensor) -> None:
        """Ids that were not offered since go."""
        self._lists[table].clamp_(min=0)

    def take_back(self, table: int, rows: Tensor) -> None:
        """Ids that were not displaced stay."""
        self._lists[table].abs_()

    def forget(self, table: int, rows: Tensor | None) -> None:
        """These ids go."""
        slots = self._lists[table]
        if rows is None:
            slots.zero_()
        else:
            slots[torch.isin(slots, (rows + 1).to(torch.int32))] = 0

    def state_dict(self) -> dict[str, Any]:
        """Where the next sample is, and whose turn."""
        return {"phase": self._phase, "passes": self._passes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._phase, self._passes = int(state["phase"]), int(state["passes"])


def _hash(ids: Tensor) -> Tensor:
    """Numbers of `HASH_BITS` bits, int64, that look random; `ids` int32."""
    mixed = ids * FIRST_FACTOR
    mixed ^= mixed >> 15
    mixed *= SECOND_FACTOR
    return mixed.bitwise_and_(2**HASH_BITS - 1).to(torch.int64)
