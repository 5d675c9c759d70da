"""Online trial: candidate exchanges take turns in the training steps of the run until one is clearly fastest.

Machines and links are slower for seconds, and not for all exchanges alike. Rounds are therefore spread out,
with steps of the best candidate so far between them, and candidates are compared within each round, by a sign
test. Clearly slower ones drop out soon; similar ones take long to tell apart, which costs as little as they
differ.
"""

from collections.abc import Mapping, Sequence
from math import ceil, sqrt
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.autotune.candidates import slowest

STEPS: Final = 2
"""Timed steps of a turn, after one that is not timed because caches hold another candidate's data."""
MOST_ROUNDS: Final = 40
"""Largest number of rounds, in each of which all remaining candidates take a turn."""
PAUSE_S: Final = 0.5
"""Seconds between rounds, at least one step, in which the best candidate so far is used."""
LEAST_ROUNDS: Final = 8
"""Rounds before any contender drops out; of two equal ones, one loses all of them once in 128 times."""
SURE: Final = 2.5
"""Standard deviations between rounds won and lost that are significant: 8 to 0, 13 to 3, 24 to 8."""

Rounds = Sequence[Mapping[int, float]]
"""Seconds by contender, for each round; a contender that dropped out is in no later round."""


class OnlineTrial:
    """Schedules the turns of candidates and compares their steps; all ranks call it in the same order.

    Args:
        finalists: indices of the candidates.
    """

    def __init__(
        self, finalists: Sequence[int], device: torch.device, group: dist.ProcessGroup | None = None
    ) -> None:
        self._running, self._device, self._group = list(finalists), device, group
        self._rounds: list[dict[int, float]] = []
        self._steps_paused = 0
        self._begin_round()

    @property
    def is_conclusive(self) -> bool:
        """Whether there are enough rounds to choose by."""
        return self.is_over or len(self._rounds) >= LEAST_ROUNDS

    @property
    def is_over(self) -> bool:
        """Whether a single candidate remains, or the rounds are used up."""
        return len(self._running) == 1 or len(self._rounds) >= MOST_ROUNDS

    @property
    def turn(self) -> int | None:
        """Index of the candidate for the next step; None: the best one so far, between two rounds.

        Each round starts with another candidate.
        """
        if self._steps_paused:
            return None
        place = self._steps_done // (1 + STEPS) + len(self._rounds)
        return self._running[place % len(self._running)]

    @property
    def times_s(self) -> dict[int, float]:
        """Seconds of a step on the slowest rank, by index, after at least one round."""
        return typical(self._rounds)

    def observe(self, step_s: float) -> bool:
        """Record the duration of the step of `turn` on this rank; true if it completes a round."""
        turn = self.turn
        if turn is None:
            self._steps_paused -= 1
            return False
        if self._steps_done % (1 + STEPS):  # the first step of a turn has cold caches
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


def running(rounds: Rounds) -> list[int]:
    """List the contenders of the last round that have not clearly lost to the fastest."""
    times = typical(rounds)
    leader = min(rounds[-1], key=times.__getitem__)
    return [each for each in rounds[-1] if not _beats(rounds, leader, each)]


def typical(rounds: Rounds) -> dict[int, float]:
    """Estimate the seconds of each contender.

    A contender that is in all rounds has its median; the others have that times the median of their ratio to
    it within rounds.
    """
    reference = next(iter(rounds[-1]))
    reference_s = median(took[reference] for took in rounds)
    return {
        each: reference_s * median(took[each] / took[reference] for took in rounds if each in took)
        for each in rounds[0]
    }


def _beats(rounds: Rounds, one: int, other: int) -> bool:
    """Whether `one` has won significantly more rounds against `other` than it has lost (a sign test)."""
    both = [(took[one], took[other]) for took in rounds if other in took]
    lead = sum((one_s < other_s) - (one_s > other_s) for one_s, other_s in both)
    return len(both) >= LEAST_ROUNDS and lead >= SURE * sqrt(len(both))
