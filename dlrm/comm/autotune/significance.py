"""Comparing what takes turns, on machines that others use as well.

Such a machine is slower at one time than at another, by more than contenders differ. So each round is
compared within itself, and who has clearly lost to the fastest takes no further turns.
"""

from collections.abc import Mapping, Sequence
from math import sqrt
from statistics import median
from typing import Final

LEAST_ROUNDS: Final = 8
"""After which who has lost all of them is out: of two equal ones, one does so once in 128 times."""
SURE: Final = 2.5
"""Standard deviations by which rounds won and lost differ, if that is no luck: 8 to 0, 13 to 3, 24 to 8."""

Rounds = Sequence[Mapping[int, float]]
"""Seconds by contender, round by round; who is left out is not in later ones either."""


def running(rounds: Rounds) -> list[int]:
    """Who may be the fastest: all in the last round that have not clearly lost to the fastest."""
    times = typical(rounds)
    leader = min(rounds[-1], key=times.__getitem__)
    return [each for each in rounds[-1] if not _beats(rounds, leader, each)]


def typical(rounds: Rounds) -> dict[int, float]:
    """Seconds of each contender.

    Of one that is in all rounds, the median; of each other one, that times the median of its ratio to that
    one within a round.
    """
    reference = next(iter(rounds[-1]))
    reference_s = median(took[reference] for took in rounds)
    return {
        each: reference_s * median(took[each] / took[reference] for took in rounds if each in took)
        for each in rounds[0]
    }


def _beats(rounds: Rounds, one: int, other: int) -> bool:
    """Whether `one` has won so many more rounds than it has lost that it was no luck (a sign test)."""
    both = [(took[one], took[other]) for took in rounds if other in took]
    lead = sum((one_s < other_s) - (one_s > other_s) for one_s, other_s in both)
    return len(both) >= LEAST_ROUNDS and lead >= SURE * sqrt(len(both))
