"""Comparing what takes turns, on machines that others use as well.

Such a machine is slower at one time than at another, by more than contenders differ. So each round is
compared within itself, and rounds go on until some in a row agree, or they are as many as anybody wants.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

LEAST_ROUNDS: Final = 8
"""In a row that agree; of two equal contenders, the same one wins as many once in 128 times."""

Rounds = Sequence[Sequence[float]]
"""Seconds of each contender, round by round."""


def agree(rounds: Rounds) -> bool:
    """Whether the same contender has won the last `LEAST_ROUNDS` rounds."""
    winners = [min(range(len(took)), key=took.__getitem__) for took in rounds]
    latest = set(winners[-LEAST_ROUNDS:])
    return len(rounds) >= LEAST_ROUNDS and len(latest) == 1


def typical(rounds: Rounds) -> list[float]:
    """Seconds of each contender.

    Of the first, the median over rounds; of each other one, that times the median of its ratio to the first
    within a round.
    """
    first_s = median(took[0] for took in rounds)
    return [first_s * median(took[each] / took[0] for took in rounds) for each in range(len(rounds[0]))]
