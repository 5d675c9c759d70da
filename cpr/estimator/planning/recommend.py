"""Recommendation of a recovery and a save interval, with the thresholds at which it would change.

The decision is the paper's fall-back rule (formula 8 of `cpr.estimator.planning.formulas`). Of the intervals
that keep the target PLS, the paper takes the longest (formula 7), which costs least. Where saves cost next to
nothing, that wastes freshness, so here saves are more frequent as long as they cost at most `MAX_OVERHEAD` of
training; but never more frequent than full recovery would have them, nor so frequent that they cost more than
half of what partial recovery gains.
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
"""Share of training time up to which more frequent saves are worth their cost."""
HALF_GAIN: Final = 2.0
"""Multiple of the break-even interval at which saves cost half as much as they do at break-even."""
_FAR: Final = 1e4
"""Factor by which a value is changed at most in the search for its threshold."""
_BISECTIONS: Final = 60


@dataclass(frozen=True, kw_only=True)
class RecoveryPlan:
    """A recovery with its save interval and expected costs."""

    recovery: Literal["full", "partial"]
    interval_s: float
    """From one full save to the next."""
    overhead: Overhead
    expected_pls: float
    """Of the whole job."""

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values."""
        return {**asdict(self), "overhead": {**asdict(self.overhead), "total": self.overhead.total}}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Values at which the decision changes if only one value does; None: not within a factor of 10,000."""

    pls: float | None
    """Target PLS above which partial recovery is chosen."""
    T_fail: float | None
    """Mean time between failures, seconds, above which partial recovery is chosen."""
    O_save: float | None
    """Time of a save, seconds, below which partial recovery is chosen; all costs of saves scale with it."""


@dataclass(frozen=True, kw_only=True)
class Recommendation:
    """A recommended recovery with its alternatives."""

    job: Job
    target_pls: float
    ratio: float
    """Share of the rows in a priority save, with `ratio` x interval between saves; 1: no priority saves."""
    full: RecoveryPlan
    """Full recovery at its best interval."""
    partial: RecoveryPlan | None
    """None: storage is too slow for the target PLS."""
    naive: RecoveryPlan
    """Partial recovery at the best interval of full recovery."""
    is_partial: bool
    """Whether partial recovery is recommended."""
    thresholds: Thresholds

    @property
    def chosen(self) -> RecoveryPlan:
        """The recommended plan."""
        return self.partial if self.is_partial and self.partial is not None else self.full

    @property
    def gain(self) -> float:
        """Share of useful training time gained by partial recovery; negative: lost."""
        return 0.0 if self.partial is None else self.full.overhead.total - self.partial.overhead.total

    @property
    def row_interval_s(self) -> float | None:
        """Seconds from one priority save to the next; None without priority saves."""
        return self.ratio * self.chosen.interval_s if self.is_partial and self.ratio < 1 else None

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values: times in seconds, overheads as shares of useful training time."""
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
    """Recommend a recovery and a save interval for a job.

    Args:
        job: with the costs of its saves and failures.
        target_pls: acceptable portion of lost samples.
        ratio: share of the rows in a priority save; 1: no priority saves.

    Raises:
        ValueError: the target or the ratio is impossible.
    """
    check_target(target_pls)
    if not 0 < ratio <= 1:
        raise ValueError(f"the ratio is {ratio:g}; it is a share of the rows, above 0 and at most 1")
    T_full = interval_full(job)
    can_keep_target = target_pls >= reachable_pls(job)
    return Recommendation(
        job=job,
        target_pls=target_pls,
        ratio=ratio,
        full=RecoveryPlan(
            recovery="full", interval_s=T_full, overhead=overhead_full(job, T_full), expected_pls=0.0
        ),
        partial=_partial(job, recommended_interval(job, target_pls)) if can_keep_target else None,
        naive=_partial(job, T_full),
        is_partial=_wins(job, target_pls),
        thresholds=_thresholds(job, target_pls),
    )


def recommended_interval(job: Job, target_pls: float) -> float:
    """The recommended save interval of partial recovery, seconds.

    Raises:
        ValueError: the target is not a share, or storage is too slow for it.
    """
    worth_having = max(
        job.O_blocked_partial / MAX_OVERHEAD,
        interval_full(job),
        HALF_GAIN * interval_break_even(job),
        job.shortest_partial,
    )
    return min(interval_partial(job, target_pls), worth_having)


def with_save_time(job: Job, O_save: float) -> Job:
    """The job with another time of a save, and all costs of saves scaled in proportion."""
    factor = O_save / job.O_save
    blocked_save, O_rows, blocked_rows = job.blocked_save, job.O_rows, job.blocked_rows
    if blocked_save is not None:
        blocked_save = min(blocked_save * factor, O_save)  # which rounding may exceed
    if O_rows is not None:
        O_rows, blocked_rows = O_rows * factor, min(blocked_rows, O_rows) * factor
    return replace(job, O_save=O_save, blocked_save=blocked_save, O_rows=O_rows, blocked_rows=blocked_rows)


def _partial(job: Job, T_save: float) -> RecoveryPlan:
    return RecoveryPlan(
        recovery="partial",
        interval_s=T_save,
        overhead=overhead_partial(job, T_save),
        expected_pls=expected_pls(job, T_save),
    )


def _wins(job: Job, target_pls: float) -> bool:
    return target_pls >= reachable_pls(job) and partial_wins(job, target_pls)


def _thresholds(job: Job, target_pls: float) -> Thresholds:
    is_partial = _wins(job, target_pls)
    T_fail = _turning_point(
        job.T_fail,
        job.T_fail / _FAR if is_partial else job.T_fail * _FAR,
        lambda T_fail: _wins(replace(job, T_fail=T_fail), target_pls),
    )
    return Thresholds(
        pls=pls_threshold(job) if interval_break_even(job) <= job.T_total else None,
        T_fail=T_fail if T_fail is not None and T_fail > job.O_save else None,
        O_save=_turning_point(
            job.O_save,
            job.T_total if is_partial else job.O_save / _FAR,
            lambda O_save: _wins(with_save_time(job, O_save), target_pls),
        ),
    )


def _turning_point(value: float, farthest: float, wins: Callable[[float], bool]) -> float | None:
    """The value between here and `farthest` where the answer changes; None: it does not."""
    now = wins(value)
    if wins(farthest) == now:
        return None
    same, other = value, farthest
    for _ in range(_BISECTIONS):
        middle = math.sqrt(same * other)  # geometric, as the values span orders of magnitude
        same, other = (middle, other) if wins(middle) == now else (same, middle)
    return other
