"""Comparing what takes turns, on machines that others use as well.

Such a machine is slower at one time than at another, by more than contenders differ. So each round is
compared within itself, and rounds go on until they agree or are many.
"""

from collections.abc import Sequence
from statistics import median
from typing import Final

LEAST_ROUNDS: Final = 8
"""That may agree by chance once in 128 times, if two contenders are equal."""

Rounds = Sequence[Sequence[float]]
"""Seconds of each contender, round by round."""


def agree(rounds: Rounds) -> bool:
    """Whether there are enough rounds, and the same contender has won them all."""
    winners = {min(range(len(took)), key=took.__getitem__) for took in rounds}
    return len(rounds) >= LEAST_ROUNDS and len(winners) == 1


def typical(rounds: Rounds) -> list[float]:
    """Seconds of each contender.

    Of the first, the median over rounds; of each other one, that times the median of its ratio to the first
    within a round.
    """
    first_s = median(took[0] for took in rounds)
    return [first_s * median(took[each] / took[0] for took in rounds) for each in range(len(rounds[0]))]
