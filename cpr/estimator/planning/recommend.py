"""Full or partial recovery, and how often to save: the decision, why, and what would change it.

The decision is the paper's fall-back rule (formula 8 of `cpr.estimator.planning.formulas`). Of the intervals
that keep the target PLS, the paper takes the longest (formula 7), which costs least. Where saves cost next to
nothing that gives away freshness for nothing, so here saves come more often as long as they cost at most
`MAX_OVERHEAD` of training, and never more often than full recovery would have them, nor so often that they
cost more than half of what partial recovery spares: so it is still the cheaper one.
"""

# ruff: noqa: N803, N806 - the paper's symbols

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from cpr.estimator.planning.formulas import (
    Job,
    Overhead,
    check_target,
    expected_pls,
    interval_break_even,
    interval_full,
    interval_partial,
    overhead_full,
    overhead_partial,
    partial_wins,
    pls_threshold,
    reachable_pls,
)

MAX_OVERHEAD: Final = 0.001
"""Saves that cost no more of training time than this are worth having."""
HALF_SPARED: Final = 2.0
"""At so many times the interval at which both recoveries cost the same, saves cost half as much as there."""
_FAR: Final = 1e4
"""Asking what would change a decision, nobody looks at values so many times larger or smaller."""
_BISECTIONS: Final = 60


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """One way to recover, at its interval."""

    recovery: Literal["full", "partial"]
    interval_s: float
    """From one save of everything to the next."""
    overhead: Overhead
    expected_pls: float
    """Of the whole job."""

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {**asdict(self), "overhead": {**asdict(self.overhead), "total": self.overhead.total}}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Where the decision changes if one value alone does; None: nowhere near what is possible."""

    pls: float | None
    """Target above which partial recovery is the choice: the cheaper one, if saves can come so often."""
    T_fail: float | None
    """Mean time between failures, seconds: above it partial recovery is the choice."""
    O_save: float | None
    """Time of a save, seconds: below it partial recovery is the choice. What it costs training, and row
    saves, change in proportion."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """What to do, and what it rests on."""

    job: Job
    target_pls: float
    ratio: float
    """Of the rows that a priority save holds; they come `ratio` x interval apart. 1: no priority."""
    full: RecoveryPlan
    """At its best interval."""
    partial: RecoveryPlan | None
    """None: saves cannot come as often as the target asks for."""
    naive: RecoveryPlan
    """Partial recovery at the interval that is best for full recovery."""
    is_partial: bool
    """Whether partial recovery it is."""
    thresholds: Thresholds

    @property
    def chosen(self) -> RecoveryPlan:
        """What to do."""
        return self.partial if self.is_partial and self.partial is not None else self.full

    @property
    def gain(self) -> float:
        """What partial recovery saves of useful training time; negative: what it would cost more. 0: none."""
        return 0.0 if self.partial is None else self.full.overhead.total - self.partial.overhead.total

    @property
    def row_interval_s(self) -> float | None:
        """From one save of the most important rows to the next; None: saves are of everything."""
        return self.ratio * self.chosen.interval_s if self.is_partial and self.ratio < 1 else None

    def to_json(self) -> dict[str, Any]:
        """For machines; times in seconds, overheads as shares of useful training time."""
        return {
            "recovery": self.chosen.recovery,
            "interval_s": self.chosen.interval_s,
            "ratio": self.ratio if self.is_partial else 1.0,
            "row_interval_s": self.row_interval_s,
            "target_pls": self.target_pls,
            "gain": self.gain,
            "full": self.full.to_json(),
            "partial": self.partial.to_json() if self.partial else None,
            "partial_at_full_interval": self.naive.to_json(),
            "thresholds": asdict(self.thresholds),
            "job": asdict(self.job),
            "time_to_loss_s": self.job.time_to_loss_s,
        }


def recommend(job: Job, target_pls: float = 0.1, ratio: float = 0.125) -> Recommendation:
    """Decide.

    Args:
        job: and what its failures cost.
        target_pls: portion of lost samples that is put up with.
        ratio: of the rows that a priority save is to hold; 1: no priority.

    Raises:
        ValueError: the target or the ratio is impossible.
    """
    check_target(target_pls)
    if not 0 < ratio <= 1:
        raise ValueError(f"the ratio is {ratio:g}; it is a share of the rows, above 0 and at most 1")
    is_partial, full = _wins(job, target_pls), _full(job)
    return Recommendation(
        job=job,
        target_pls=target_pls,
        ratio=ratio,
        full=full,
        partial=_partial(job, target_pls),
        naive=_plan_partial(job, full.interval_s),
        is_partial=is_partial,
        thresholds=Thresholds(
            pls=pls_threshold(job) if interval_break_even(job) <= job.T_total else None,
            T_fail=_least_time_to_failure(job, target_pls, is_partial),
            O_save=_longest_save(job, target_pls, is_partial),
        ),
    )


def recommended_interval(job: Job, target_pls: float) -> float:
    """From save to save, for partial recovery: the longest that keeps the target, or what is worth having.

    Raises:
        ValueError: the target is no share, or saves cannot come as often as it asks for.
    """
    worth_having = max(
        job.O_blocked_partial / MAX_OVERHEAD,
        interval_full(job),
        HALF_SPARED * interval_break_even(job),
        job.shortest_partial,
    )
    return min(interval_partial(job, target_pls), worth_having)


def _full(job: Job) -> RecoveryPlan:
    T_save = interval_full(job)
    return RecoveryPlan(
        recovery="full", interval_s=T_save, overhead=overhead_full(job, T_save), expected_pls=0.0
    )


def _partial(job: Job, target_pls: float) -> RecoveryPlan | None:
    if target_pls < reachable_pls(job):
        return None
    return _plan_partial(job, recommended_interval(job, target_pls))


def _plan_partial(job: Job, T_save: float) -> RecoveryPlan:
    return RecoveryPlan(
        recovery="partial",
        interval_s=T_save,
        overhead=overhead_partial(job, T_save),
        expected_pls=expected_pls(job, T_save),
    )


def _wins(job: Job, target_pls: float) -> bool:
    return target_pls >= reachable_pls(job) and partial_wins(job, target_pls)


def _least_time_to_failure(job: Job, target_pls: float, is_partial: bool) -> float | None:
    """Mean time between failures above which partial recovery wins."""
    found = _turning_point(
        job.T_fail,
        job.T_fail / _FAR if is_partial else job.T_fail * _FAR,
        lambda T_fail: _wins(replace(job, T_fail=T_fail), target_pls),
    )
    return found if found is not None and found > job.O_save else None


def _longest_save(job: Job, target_pls: float, is_partial: bool) -> float | None:
    """Time of a save below which partial recovery wins."""

    def wins(O_save: float) -> bool:
        return _wins(_with_save(job, O_save), target_pls)

    return _turning_point(job.O_save, job.T_total if is_partial else job.O_save / _FAR, wins)


def _with_save(job: Job, O_save: float) -> Job:
    """The job with saves that take so long, and all else that saves take and cost in proportion."""
    return replace(
        job,
        O_save=O_save,
        blocked_save=None if job.blocked_save is None else job.blocked_save / job.O_save * O_save,
        O_rows=None if job.O_rows is None else job.O_rows / job.O_save * O_save,
        blocked_rows=job.blocked_rows / job.O_save * O_save,
    )


def _turning_point(value: float, farthest: float, wins: Callable[[float], bool]) -> float | None:
    """The value from here to `farthest` where the answer changes; None: it does not."""
    now = wins(value)
    if wins(farthest) == now:
        return None
    same, other = value, farthest
    for _ in range(_BISECTIONS):
        middle = math.sqrt(same * other)
        same, other = (middle, other) if wins(middle) == now else (same, middle)
    return other
