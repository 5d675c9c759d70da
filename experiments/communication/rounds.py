"""How long the contenders of `experiments.communication` take turns in a cell, and which of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from experiments.communication.contenders import BASELINE, LIMIT, is_comparable
from experiments.splitting.figures import Ratio

STAYS_WITHIN: Final = 1.03
"""Times the fastest: what clearly takes longer takes no further turns."""
FIRST_STAYS_WITHIN: Final = 1.5
"""The same after fewer than `SURE_ROUNDS` rounds, which tell nothing of how much luck there was."""
SURE_ROUNDS: Final = 3
SHARED_ROUNDS: Final = 12
"""After which those that `auto` is compared with go on alone: their ratios have to be known best."""

Rounds = Sequence[Mapping[str, float]]
"""Seconds of a step by contender, round by round; who is left out is not in later ones either."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured in a cell."""

    full_rounds: int
    """Of all contenders, at its beginning."""
    least_rounds: int
    """In all; after the full ones, of those that are close to the best."""
    most_rounds: int
    seconds: float
    """From the end of the full rounds: after that no further round begins, if they are enough."""
    reach: float
    """How far from a ratio its interval may reach for a cell to be over sooner."""


def still_in(rounds: Rounds, chosen: str) -> list[str]:
    """Who takes another turn.

    What `auto` chose, and comparable contenders that may be about as fast as the best of these. In the
    first rounds, also those that all are compared with, and others that may be about as fast as the best of
    all.

    Args:
        rounds: so far.
        chosen: by `auto`.
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
    """Whether a cell's ratios are known well, whatever they are; or else, whether time is up.

    Args:
        rounds: so far.
        chosen: by `auto`: its ratios to whom it may be compared with are those that count.
        effort: allowed.
        elapsed_s: since the full rounds.
    """
    others = {name for name in rounds[-1] if is_comparable(name)} - {chosen}
    return all(is_known(rounds, chosen, name, effort, elapsed_s) for name in others)


def is_known(rounds: Rounds, one: str, other: str, effort: Effort, elapsed_s: float) -> bool:
    """As `is_over`, for one ratio."""
    if len(rounds) < max(effort.full_rounds, effort.least_rounds):
        return False
    if len(rounds) >= effort.most_rounds or elapsed_s > effort.seconds:
        return True
    return Ratio.of(ratios(rounds, one, other)).reach <= effort.reach


def ratios(rounds: Rounds, one: str, other: str) -> list[float]:
    """Throughput of `one` contender over the `other`'s, in each round that has both."""
    return [each[other] / each[one] for each in rounds if {one, other} <= each.keys()]
