"""Decides which contenders of `experiments.communication` continue in a cell, and when the cell ends."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from experiments.communication.contenders import BASELINE, LIMIT, is_comparable
from experiments.harness.statistics import Ratio

STAYS_WITHIN: Final = 1.03
"""Multiple of the fastest time above which a contender leaves the cell."""
FIRST_STAYS_WITHIN: Final = 1.5
"""The same after fewer than `SURE_ROUNDS` rounds, which say little about chance."""
SURE_ROUNDS: Final = 3
SHARED_ROUNDS: Final = 12
"""Rounds after which only comparable contenders continue, whose ratios need the best precision."""

Rounds = Sequence[Mapping[str, float]]
"""Seconds of a step by contender, for each round; a contender that left does not return."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Number of rounds and time limit of a cell."""

    full_rounds: int
    """First rounds, of all contenders."""
    least_rounds: int
    """Minimum of all rounds; after the full ones, only contenders close to the best continue."""
    most_rounds: int
    seconds: float
    """Time limit after the full rounds, once the minimum of rounds is reached."""
    reach: float
    """Relative reach of the intervals at which a cell ends early."""


def still_in(rounds: Rounds, chosen: str) -> list[str]:
    """Contenders of the next round.

    These are the choice of `auto` and the comparable contenders that may be about as fast as the best of
    them. In the first rounds also the baseline, the limit, and others that may be about as fast as the best
    of all.

    Args:
        rounds: so far.
        chosen: contender that `auto` chose.
    """
    within = STAYS_WITHIN if len(rounds) >= SURE_ROUNDS else FIRST_STAYS_WITHIN
    typical = {name: median(each[name] for each in rounds) for name in rounds[-1] if name != LIMIT}
    best = min(typical, key=typical.__getitem__)
    best_comparable = min(filter(is_comparable, typical), key=typical.__getitem__)

    def is_close(name: str) -> bool:
        other = best_comparable if is_comparable(name) else best
        return Ratio.of(ratios(rounds, name, other)).high >= 1 / within

    close = {chosen, *filter(is_close, typical)}
    if len(rounds) >= SHARED_ROUNDS:
        return sorted(filter(is_comparable, close))
    return sorted(close | {BASELINE, LIMIT} & rounds[-1].keys())


def is_over(rounds: Rounds, chosen: str, effort: Effort, elapsed_s: float) -> bool:
    """Whether the intervals of all ratios of `auto` to comparable contenders are narrow, or the time is up.

    Args:
        rounds: so far.
        chosen: contender that `auto` chose.
        effort: limits of rounds and time.
        elapsed_s: since the full rounds.
    """
    others = {name for name in rounds[-1] if is_comparable(name)} - {chosen}
    return all(is_known(rounds, chosen, name, effort, elapsed_s) for name in others)


def is_known(rounds: Rounds, one: str, other: str, effort: Effort, elapsed_s: float) -> bool:
    """Whether the interval of one ratio is narrow, or the time is up; see `is_over`."""
    if len(rounds) < max(effort.full_rounds, effort.least_rounds):
        return False
    if len(rounds) >= effort.most_rounds or elapsed_s > effort.seconds:
        return True
    return Ratio.of(ratios(rounds, one, other)).reach <= effort.reach


def ratios(rounds: Rounds, one: str, other: str) -> list[float]:
    """Throughput of `one` contender over that of the `other`, in each round with both."""
    return [each[other] / each[one] for each in rounds if {one, other} <= each.keys()]
