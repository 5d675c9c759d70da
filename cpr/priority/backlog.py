"""A log of lookups, which a tracker processes many passes at a time."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import torch

from cpr.priority.tracker import TrackedGroup
from cpr.shards.lookups import Lookups, Spreads

CAPACITY: Final = 2**20
"""Size in numbers of 4 bytes: the ids of some twenty batches of 2048 samples with 26 ids."""
HEAD: Final = 2
"""Numbers at the start of an entry: lookups of the pass, and the first lookup that is kept."""


class Backlog:
    """A log of the lookups of forward passes, for trackers whose tables are on the CPU.

    A tracker's memory is not cached during a training step: one sweep over it for twenty passes costs less
    than half of twenty sweeps. The log is allocated by `TrackedGroup.allocate`, so that it survives a worker
    together with the tracker's memory.

    Args:
        group: the tracked group.
        period: one of this many lookups is kept, counted over all passes.
        sweep: processes the lookups of some passes, in their order.
    """

    def __init__(
        self, group: TrackedGroup, sweep: Callable[[Sequence[Lookups]], None], period: int = 1
    ) -> None:
        self._layout: Final = group.layout
        self._period: Final = period
        self._sweep: Final = sweep
        self._spreads = Spreads()
        self._log: np.ndarray | None = None
        if group.device.type == "cpu":  # on a GPU each pass is processed at once, without copies
            memory = group.allocate(f"{group.name}-backlog", torch.int32, 1 + CAPACITY)
            self._log = memory.numpy()  # NumPy's small copies are several times as fast as PyTorch's

    def see(self, lookups: Lookups, first: int = 0) -> None:
        """Log lookups, or sweep now if the log is full or missing.

        Args:
            lookups: of a pass.
            first: index of the first lookup that is kept.
        """
        num, num_ends = lookups.ids.numel(), lookups.ends.numel()
        size = HEAD + num_ends + len(range(first, num, self._period))
        if self._log is None or size > CAPACITY:
            self.sweep()
            self._sweep([lookups.every(self._period, first)])
            return
        if self._log[0] + size > CAPACITY:
            self.sweep()
        used = int(self._log[0])
        entry = self._log[1 + used : 1 + used + size]
        entry[0], entry[1] = num, first
        entry[HEAD : HEAD + num_ends] = lookups.ends.numpy()
        entry[HEAD + num_ends :] = lookups.ids.numpy()[first :: self._period]
        self._log[0] = used + size  # written last, as the worker may die at any time

    def sweep(self) -> None:
        """Process all logged lookups."""
        if self._log is None or not self._log[0]:
            return
        self._sweep(list(self._entries(self._log)))
        self._log[0] = 0

    def _entries(self, log: np.ndarray) -> Iterator[Lookups]:
        num_ends = len(self._layout.feature_tables) + 1
        place, used = 1, 1 + int(log[0])
        while place < used:
            num, first = map(int, log[place : place + HEAD])
            place += HEAD
            ends = torch.from_numpy(log[place : place + num_ends]).to(torch.int64)
            place += num_ends
            kept = len(range(first, num, self._period))
            ids = torch.from_numpy(log[place : place + kept])
            place += kept
            yield self._spreads.of(ends, num).every(self._period, first).lookups(self._layout, ids)
