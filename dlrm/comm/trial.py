"""Finalists take turns in training itself: each of their steps is one of the run's, and none is in vain."""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.planner import slowest
from dlrm.comm.rounds import agree, typical

STEPS: Final = 2
"""Of a turn, that count; the one before them does not, as it finds in the caches what others left there."""
MOST_ROUNDS: Final = 20


class Trial:
    """Says who makes the next step, and who has made them fastest. All ranks call it in the same order.

    Args:
        num: of finalists.
        device: on which the group's backend exchanges tensors.
        group: None is all ranks.
    """

    def __init__(self, num: int, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._num, self._device, self._group = num, device, group
        self._rounds: list[Sequence[float]] = []
        self._took_s: list[list[float]] = [[] for _ in range(num)]
        self._steps = 0

    @property
    def is_over(self) -> bool:
        """Whether more steps would tell nothing new."""
        return len(self._rounds) >= MOST_ROUNDS or agree(self._rounds)

    @property
    def turn(self) -> int:
        """Of which finalist the next step is; in each round, another one comes first."""
        return (self._steps // (1 + STEPS) + len(self._rounds)) % self._num

    @property
    def times_s(self) -> list[float]:
        """Seconds of a step of each finalist on the slowest rank, the same on all ranks."""
        return typical(self._rounds)

    def observe(self, step_s: float) -> None:
        """The step of `turn` is over; it took so long on this rank."""
        if self._steps % (1 + STEPS):
            self._took_s[self.turn].append(step_s)
        self._steps += 1
        if self._steps == self._num * (1 + STEPS):
            here = [sum(took) / STEPS for took in self._took_s]
            self._rounds.append(slowest(here, self._device, self._group))
            self._took_s, self._steps = [[] for _ in range(self._num)], 0
