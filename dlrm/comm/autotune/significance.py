"""Sign test for contenders that take turns on a busy machine.

Such a machine varies in speed by more than contenders differ. Contenders are therefore compared within each
round, and those that have clearly lost to the fastest drop out.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from typing import Final

LEAST_ROUNDS: Final = 8
"""Rounds before any contender drops out; of two equal ones, one loses all of them once in 128 times."""
SURE: Final = 2.5
"""Standard deviations between rounds won and lost that are significant: 8 to 0, 13 to 3, 24 to 8."""

Rounds = Sequence[Mapping[int, float]]
"""Seconds by contender, for each round; a contender that dropped out is in no later round."""


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
