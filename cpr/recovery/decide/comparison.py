"""Comparison of the ways to recover from a failure by what they cost, before any row is moved.

The costs of a way are seconds (rows brought into place, and steps trained again), and samples whose training
is lost. A lost sample costs what it took to train it, so that both add up to seconds of training thrown away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from cpr.humanize import align_columns, duration_text
from cpr.recovery.decide.assessment import RecoveryPolicy
from cpr.recovery.run.report import Way

AUC_PER_PLS: Final = MappingProxyType(
    {None: 0.0063, "random": 0.0056, "scar": 0.0016, "mfu": 0.0010, "ssu": 0.0006}
)
"""AUC lost for each unit of PLS, by the scheme of priority saves; None: all rows are saved alike.

Measured on synthetic Criteo-like data: `slope_...` in `experiments/results/pls_auc.json`."""
FULL: Final = "full"
"""Name of the way in which all workers go back to the checkpoint."""
PLAINLY: Final = 2.0
"""How many times less a way must cost than a preferred one to be plainly cheaper, as it is estimated, ..."""
PLAINLY_S: Final = 10.0
"""... and how many seconds less, as a restart takes seconds anyway."""


@dataclass(frozen=True)
class Choice:
    """The ways that were compared, in order of preference; one of them is chosen."""

    ways: tuple[Way, ...]

    @property
    def way(self) -> Way:
        """The chosen way."""
        return next(each for each in self.ways if each.is_chosen)

    @property
    def reason(self) -> str | None:
        """Why it is not the first, which loses the least among those that keep live values; None if it is."""
        first, chosen = self.ways[0], self.way
        if chosen is first:
            return None
        if first.objection is not None:
            return first.objection
        return f"{first.name} would take {_seconds(first)}, {chosen.name} {_seconds(chosen)}"

    def __str__(self) -> str:
        rows = [("  way", "seconds", "samples redone", "samples lost", "PLS", "AUC lost", "")]
        rows += [
            (
                f"{'>' if way.is_chosen else ' '} {way.name}",
                "?" if way.seconds is None else f"{way.seconds:,.1f}",
                f"{way.redone:,}",
                f"{way.lost:,.0f}",
                "?" if way.pls is None else f"{way.pls:.6f}",
                "?" if way.auc_lost is None else f"{way.auc_lost:.2g}",
                way.objection or "",
            )
            for way in self.ways
        ]
        return "\n".join(align_columns(rows, left=(0, 6)))


def compare(ways: Sequence[Way], policy: RecoveryPolicy, seconds_per_sample: float | None = None) -> Choice:
    """Choose how to recover.

    Ways over a limit of the policy are out; if all are over `max_pls`, the one with the least PLS is taken.
    A way is out, too, if another is better in some and worse in none of: seconds for the rows, samples
    redone, samples lost, PLS. Of the rest the first is taken, unless another one is plainly cheaper.

    A pure function: ranks that pass the same values choose the same.

    Args:
        ways: those that are open, in order of preference; at least one.
        policy: limits, and the AUC that PLS costs.
        seconds_per_sample: of the run's training; None: unknown, and then no way counts as plainly cheaper.
    """
    assert ways, "after a failure it is always possible to go back"
    priced = [_priced(each, policy, seconds_per_sample) for each in ways]
    allowed = [each for each in priced if each.objection is None]
    if allowed:
        sound = [each for each in allowed if not any(_dominates(other, each) for other in allowed)]
        chosen = _first_not_plainly_dearer(sound, seconds_per_sample)
    else:
        possible = [each for each in priced if each.lost_share <= policy.max_lost_share] or priced
        chosen = min(possible, key=lambda each: _or_infinite(each.pls))
    at = next(number for number, each in enumerate(priced) if each is chosen)
    return Choice(tuple(replace(each, is_chosen=number == at) for number, each in enumerate(priced)))


def _priced(way: Way, policy: RecoveryPolicy, seconds_per_sample: float | None) -> Way:
    redone_s = 0.0 if not way.redone else None
    if seconds_per_sample is not None:
        redone_s = way.redone * seconds_per_sample
    slope, added = policy.auc_per_pls, way.pls_added
    return replace(
        way,
        seconds=None if redone_s is None else way.rows_s + redone_s,
        auc_lost=None if slope is None or added is None else slope * max(0.0, added),
        objection=_objection(way, policy),
    )


def _objection(way: Way, policy: RecoveryPolicy) -> str | None:
    """Why a limit forbids a way. What is unknown exceeds any limit, except where all workers go back."""
    if way.lost_share > policy.max_lost_share:
        return (
            f"{way.lost_share:.1%} of the tables were lost, more than max_lost_share = "
            f"{policy.max_lost_share:.1%}"
        )
    if policy.max_pls is None or (way.pls_added is not None and way.pls_added <= 0):
        return None
    if way.pls is None or way.pls_added is None:
        if way.name == FULL:
            return None
        return f"the portion of lost samples is not known, and max_pls = {policy.max_pls}"
    if way.pls <= policy.max_pls:
        return None
    return (
        f"the portion of lost samples would rise from {way.pls - way.pls_added:.6f} to {way.pls:.6f}, above "
        f"max_pls = {policy.max_pls}"
    )


def _dominates(one: Way, other: Way) -> bool:
    """Whether a way is at least as good as another in everything, and better in something."""
    mine, its = ((each.rows_s, each.redone, each.lost, _or_infinite(each.pls)) for each in (one, other))
    return mine != its and all(a <= b for a, b in zip(mine, its, strict=True))


def _first_not_plainly_dearer(ways: Sequence[Way], seconds_per_sample: float | None) -> Way:
    if seconds_per_sample is None:
        return ways[0]
    costs_s = [each.rows_s + (each.redone + each.lost) * seconds_per_sample for each in ways]
    least_s = min(costs_s)
    return next(
        way
        for way, cost_s in zip(ways, costs_s, strict=True)
        if cost_s <= least_s * PLAINLY or cost_s - least_s <= PLAINLY_S
    )


def _or_infinite(pls: float | None) -> float:
    return float("inf") if pls is None else pls


def _seconds(way: Way) -> str:
    return "an unknown time" if way.seconds is None else duration_text(way.seconds)
