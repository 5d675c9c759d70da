"""Finalists take turns in training itself: each of their steps is one of the run's, and none is in vain."""

from collections.abc import Sequence
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.planner import slowest
from dlrm.comm.rounds import agree, typical

STEPS: Final = 2
"""Of a turn, that count; the one before them does not, as it finds in the caches what others left there."""
MOST_ROUNDS: Final = 12


class Trial:
    """Says who makes the next step, and who has made them fastest. All ranks call it in the same order.

    Args:
        finalists: their indices.
        device: on which the group's backend exchanges tensors.
        group: None is all ranks.
    """

    def __init__(
        self, finalists: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._finalists, self._device, self._group = finalists, device, group
        self._rounds: list[Sequence[float]] = []
        self._begin_round()

    @property
    def is_over(self) -> bool:
        """Whether the last rounds agree, or there are as many as there may be."""
        return len(self._rounds) >= MOST_ROUNDS or agree(self._rounds)

    @property
    def turn(self) -> int:
        """Index of the finalist whose step is the next; in each round, another one comes first."""
        return self._finalists[self._place]

    @property
    def times_s(self) -> dict[int, float]:
        """Seconds of a step by index, on the slowest rank: the same on all ranks."""
        return dict(zip(self._finalists, typical(self._rounds), strict=True))

    def observe(self, step_s: float) -> None:
        """The step of `turn` is over; it took so long on this rank."""
        if self._steps_done % (1 + STEPS):
            self._took_s[self._place] += step_s / STEPS
        self._steps_done += 1
        if self._steps_done == len(self._finalists) * (1 + STEPS):
            self._rounds.append(slowest(self._took_s, self._device, self._group))
            self._begin_round()

    def _begin_round(self) -> None:
        self._steps_done = 0
        self._took_s = [0.0] * len(self._finalists)

    @property
    def _place(self) -> int:
        return (self._steps_done // (1 + STEPS) + len(self._rounds)) % len(self._finalists)
