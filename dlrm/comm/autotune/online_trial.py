"""Finalists take turns in training itself: each of their steps is one of the run's, and none is in vain.

Machines and links are slower at one time than at another, and not for all exchanges alike, for seconds. So
rounds do not follow each other at once: between them, the best so far goes on. Who is clearly slower is out
soon; to tell those that differ little takes long, and costs as little as they differ.
"""

from collections.abc import Sequence
from math import ceil
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.autotune.candidates import slowest
from dlrm.comm.autotune.significance import LEAST_ROUNDS, running, typical

STEPS: Final = 2
"""Of a turn, that count; the one before them does not, as it finds in the caches what others left there."""
MOST_ROUNDS: Final = 40
"""In each of which those that are still running take a turn."""
PAUSE_S: Final = 0.5
"""Between rounds, in which the best so far makes all steps: at least one."""


class OnlineTrial:
    """Says who makes the next step, and who has made them fastest. All ranks call it in the same order.

    Args:
        finalists: their indices.
        device: on which the group's backend exchanges tensors.
        group: None is all ranks.
    """

    def __init__(
        self, finalists: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._running, self._device, self._group = list(finalists), device, group
        self._rounds: list[dict[int, float]] = []
        self._steps_paused = 0
        self._begin_round()

    @property
    def is_telling(self) -> bool:
        """Whether its times are worth something by now."""
        return self.is_over or len(self._rounds) >= LEAST_ROUNDS

    @property
    def is_over(self) -> bool:
        """Whether one alone is left, or there are as many rounds as there may be."""
        return len(self._running) == 1 or len(self._rounds) >= MOST_ROUNDS

    @property
    def turn(self) -> int | None:
        """Index of the finalist whose step is the next; None: it is the best one's, between two rounds.

        In each round, another one comes first.
        """
        if self._steps_paused:
            return None
        place = self._steps_done // (1 + STEPS) + len(self._rounds)
        return self._running[place % len(self._running)]

    @property
    def times_s(self) -> dict[int, float]:
        """Seconds of a step by index, on the slowest rank: the same on all ranks. There must be a round."""
        return typical(self._rounds)

    def observe(self, step_s: float) -> bool:
        """The step of `turn` is over; it took so long on this rank.

        Returns:
            Whether it was the last one of a round.
        """
        turn = self.turn
        if turn is None:
            self._steps_paused -= 1
            return False
        if self._steps_done % (1 + STEPS):
            self._took_s[turn] += step_s / STEPS
        self._steps_done += 1
        if self._steps_done < len(self._running) * (1 + STEPS):
            return False
        took_s = slowest([self._took_s[each] for each in self._running], self._device, self._group)
        self._rounds.append(dict(zip(self._running, took_s, strict=True)))
        self._running = running(self._rounds)
        self._steps_paused = ceil(PAUSE_S / min(self.times_s.values()))
        self._begin_round()
        return True

    def _begin_round(self) -> None:
        self._steps_done = 0
        self._took_s = dict.fromkeys(self._running, 0.0)
