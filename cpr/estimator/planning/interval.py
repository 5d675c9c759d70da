"""Choice of the save interval during a run, from measurements.

Saves are as frequent as `max_overhead` of training time allows, never less frequent than the target PLS
requires, and never faster than storage can take them. The paper instead chooses the longest interval that
keeps the target, once, since there training waits for the whole save. The cost of a save is all training time
lost by it: waiting, and slower steps. Formula numbers are those of `cpr.estimator.planning.formulas`.
"""

from dataclasses import dataclass
from typing import Final

from cpr.estimator.planning.formulas import check_target
from cpr.fields import check_fields
from cpr.humanize import duration_text, share_text

TOLERANCE: Final = 0.25
"""An interval is kept while the best one differs by at most this share of it: measurements are noisy."""
STORAGE_SAFETY: Final = 1.5
"""Shortest interval as a multiple of the time of a save. More than 1 + `TOLERANCE`, so that an interval that
is kept although saves became slower still leaves storage enough time."""


@dataclass(frozen=True, kw_only=True)
class RunMeasurements:
    """Measurements of a run so far. A save is a full save, or the row saves that add up to one."""

    nodes: int
    """Failure domains: the paper's `N_emb`."""
    blocked_s: float
    """Training time lost by a save."""
    save_s: float
    """From the start of a save until it is stored."""
    elapsed_s: float
    """Duration of the run so far."""
    share: float = 1.0
    """Share of the rows in a single save, which counts as soon as it is stored."""
    nodes_lost: float = 0.0
    """Nodes' worth of rows lost so far. Includes failures with full recovery: they cost no samples, but show
    how often nodes are lost. Excludes failures whose memory survived."""
    pls: float = 0.0
    """Portion of lost samples so far."""
    share_left: float = 1.0
    """Share of the run's samples still to come."""

    def __post_init__(self) -> None:
        amounts = (self.blocked_s, self.elapsed_s, self.nodes_lost, self.pls)
        possible = self.save_s > 0 and 0 < self.share <= 1 and self.nodes >= 1 and 0 <= self.share_left <= 1
        if not possible or not all(amount >= 0 for amount in amounts):
            raise ValueError(f"these measurements are impossible: {self}")

    @property
    def delay_s(self) -> float:
        """Training time from the start of a single save until it counts."""
        return self.share * max(0.0, self.save_s - self.blocked_s)


@dataclass(frozen=True, kw_only=True)
class IntervalChoice:
    """A chosen save interval."""

    interval_s: float
    changed: bool
    """Whether the interval differs from the previous one."""
    reason: str
    """Explanation, for the log."""
    expected_pls: float
    """Expected PLS of the whole run with this interval."""


@dataclass(frozen=True, kw_only=True)
class IntervalRule:
    """Rule that chooses the save interval during a run.

    Raises:
        ValueError: a value is impossible; the message tells the valid range.
    """

    target_pls: float = 0.1
    """Acceptable portion of lost samples (PLS) of the whole run."""
    mean_time_to_failure_s: float | None = None
    """Prior estimate of the seconds between losses of a node in the whole job: time between failures divided
    by the nodes lost in each, as `cpr plan` reports. Weighs as much as one observed loss. None: no estimate,
    and no choice before the first loss."""
    max_overhead: float = 0.001
    """Share of training time that saves may cost, unless the target PLS requires more."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_target(self.target_pls)
        if not 0 < self.max_overhead < 1:
            raise ValueError(f"max_overhead is {self.max_overhead}; it is a share of time, between 0 and 1")
        if self.mean_time_to_failure_s is not None and not self.mean_time_to_failure_s > 0:
            raise ValueError(f"mean_time_to_failure_s is {self.mean_time_to_failure_s}; it must be positive")

    def time_to_loss_s(self, measured: RunMeasurements) -> float:
        """Seconds between losses of a node, from the prior estimate and the observed losses.

        The inverse of the mean of the rate, which is gamma distributed if losses are memoryless.

        Raises:
            ValueError: there is no prior estimate, and no loss was observed.
        """
        if self.mean_time_to_failure_s is None:
            if measured.nodes_lost == 0:
                raise ValueError(
                    "no node was lost so far and nothing is known of how often that happens: give "
                    "mean_time_to_failure_s, roughly (`cpr plan` tells the time between losses of a node)"
                )
            return measured.elapsed_s / measured.nodes_lost
        return (self.mean_time_to_failure_s + measured.elapsed_s) / (1 + measured.nodes_lost)

    def next_interval(self, measured: RunMeasurements, current_s: float | None = None) -> IntervalChoice:
        """Choose the interval from now on.

        Args:
            measured: measurements so far.
            current_s: the present interval; None: there is none.

        Raises:
            ValueError: see `time_to_loss_s`.
        """
        longest_s = self._longest(measured)
        shortest_s = measured.save_s * STORAGE_SAFETY
        cheap_s = measured.blocked_s / self.max_overhead
        best_s = max(min(cheap_s, longest_s), shortest_s)  # storage is the hard limit
        is_kept = (
            current_s is not None
            and abs(best_s - current_s) <= TOLERANCE * current_s
            and (current_s <= longest_s or longest_s < shortest_s)  # where the target can be kept, it is
        )
        interval_s = current_s if is_kept and current_s is not None else best_s
        expected = measured.pls + self._pls_to_come(measured, interval_s)
        if shortest_s > longest_s:
            reason = self._why_too_slow(measured, expected)
        elif best_s == shortest_s:
            reason = f"a save costs next to nothing; storage takes {duration_text(measured.save_s)} for it"
        elif best_s == longest_s:
            reason = self._why_target(measured)
        else:
            reason = (
                f"a save costs {duration_text(measured.blocked_s)}, "
                f"{share_text(measured.blocked_s / interval_s)} of training time"
            )
        return IntervalChoice(
            interval_s=interval_s,
            changed=interval_s != current_s,
            reason=f"a save each {duration_text(interval_s)}: {reason}",
            expected_pls=expected,
        )

    def _pls_to_come(self, measured: RunMeasurements, interval_s: float) -> float:
        """Expected PLS of the rest of the run: formula 3 for the remaining share."""
        lost_s = interval_s / 2 + measured.delay_s
        return measured.share_left * lost_s / (self.time_to_loss_s(measured) * measured.nodes)

    def _longest(self, measured: RunMeasurements) -> float:
        """The interval with which the whole run is expected to end at the target; not positive: none does."""
        if measured.share_left == 0:
            return float("inf")
        to_lose = (self.target_pls - measured.pls) / measured.share_left  # of the remaining samples
        return 2 * (to_lose * self.time_to_loss_s(measured) * measured.nodes - measured.delay_s)

    def _why_target(self, measured: RunMeasurements) -> str:
        return (
            f"the target PLS of {self.target_pls:g} asks for it; {measured.pls:.3g} so far, "
            f"{measured.share_left:.0%} of the samples to come, and one of {measured.nodes} nodes is lost "
            f"each {duration_text(self.time_to_loss_s(measured))}"
        )

    def _why_too_slow(self, measured: RunMeasurements, expected: float) -> str:
        return (
            f"as often as storage takes them, at {duration_text(measured.save_s)} a save; the target PLS of "
            f"{self.target_pls:g} asks for more, and {expected:.3g} is to be expected "
            f"({measured.pls:.3g} so far)"
        )
