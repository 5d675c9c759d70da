"""How often to save, asked again and again while a run goes on: by what it has measured, and why.

As often as costs training at most `max_overhead`, because a save that costs next to nothing is worth having;
never less often than the target PLS asks for; never faster than storage takes. The paper chooses its interval
once, from a target, and saves as seldom as that allows: there, training waits for the whole save. What a save
costs is all that training loses by it: what it waits, and how much longer the steps beside it take. Formulas
have the numbers of `cpr.estimator.planning.formulas`.
"""

from dataclasses import dataclass
from typing import Final

from cpr.estimator.planning.formulas import check_target
from cpr.fields import check_fields
from cpr.humanize import duration_text, share_text

TOLERANCE: Final = 0.25
"""An interval is kept while the best one differs by no more than this share of it: measurements jitter."""
STORAGE_SAFETY: Final = 1.5
"""An interval that is chosen is at least so many times what storage takes for a save; more than `TOLERANCE`,
so that one that is kept still leaves storage the time."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run knows of itself. Saves are those of everything, or what priority saves add up to."""

    nodes: int
    """Failure domains: the paper's `N_emb`."""
    blocked_s: float
    """That a save costs training."""
    save_s: float
    """From a save's beginning until it is stored."""
    elapsed_s: float
    """Of the run so far."""
    share: float = 1.0
    """Of the rows, that a single save holds. It counts as soon as it is stored itself."""
    nodes_lost: float = 0.0
    """Nodes' worth of rows that failures have lost so far; failures that memory outlived lose none. Those of
    failures that were recovered fully are among them: they have cost no samples, but tell how often nodes are
    lost."""
    pls: float = 0.0
    """Portion of lost samples so far."""
    share_left: float = 1.0
    """Of the samples of the whole run."""

    def __post_init__(self) -> None:
        for name in ("blocked_s", "save_s", "elapsed_s", "nodes_lost", "pls"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        if self.save_s == 0:
            raise ValueError("save_s is 0; measure a save first")
        if not 0 < self.share <= 1:
            raise ValueError(f"share is {self.share}; it is a share of the rows, above 0 and at most 1")
        if self.nodes < 1:
            raise ValueError(f"nodes is {self.nodes}; it must be 1 at least")
        if not 0 <= self.share_left <= 1:
            raise ValueError(f"share_left is {self.share_left}; it is a share, from 0 to 1")

    @property
    def delay_s(self) -> float:
        """Training time from the moment of a single save until it counts."""
        return self.share * max(0.0, self.save_s - self.blocked_s)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """How long to wait from one save to the next."""

    interval_s: float
    changed: bool
    """Whether it is another one than before."""
    reason: str
    """For the log."""
    expected_pls: float
    """Of the whole run, if it goes on like this."""


@dataclass(frozen=True, kw_only=True)
class IntervalRule:
    """Chooses the interval.

    Raises:
        ValueError: a value is impossible; says what it must be.
    """

    target_pls: float = 0.1
    """Portion of lost samples that is put up with in the whole run."""
    mean_time_to_failure_s: float | None = None
    """Between losses of a node in the whole job, as far as is known before the run: the time between failures
    over the nodes that one takes, which `cpr plan` tells. It counts as much as one loss that was seen. None:
    nothing is known, and there is no choice before the first loss."""
    max_overhead: float = 0.001
    """Share of training time that saves may cost where the target does not ask for more."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_target(self.target_pls)
        if not 0 < self.max_overhead < 1:
            raise ValueError(f"max_overhead is {self.max_overhead}; it is a share of time, between 0 and 1")
        if self.mean_time_to_failure_s is not None and not self.mean_time_to_failure_s > 0:
            raise ValueError(f"mean_time_to_failure_s is {self.mean_time_to_failure_s}; it must be positive")

    def time_to_loss_s(self, measured: Measured) -> float:
        """Seconds between losses of a node, from what was known before and what was seen since.

        The inverse of the rate's mean, which is gamma distributed if losses come at random.

        Raises:
            ValueError: nothing was known, and nothing was lost.
        """
        if self.mean_time_to_failure_s is None:
            if measured.nodes_lost == 0:
                raise ValueError(
                    "no node was lost so far and nothing is known of how often that happens: give "
                    "mean_time_to_failure_s, roughly (`cpr plan` tells the time between losses of a node)"
                )
            return measured.elapsed_s / measured.nodes_lost
        return (self.mean_time_to_failure_s + measured.elapsed_s) / (1 + measured.nodes_lost)

    def next_interval(self, measured: Measured, current_s: float | None = None) -> Choice:
        """The interval from now on.

        Args:
            measured: so far.
            current_s: the interval up to now; None: there was none.

        Raises:
            ValueError: nothing is known of failures.
        """
        longest_s = self._longest(measured)
        shortest_s = measured.save_s * STORAGE_SAFETY
        cheap_s = measured.blocked_s / self.max_overhead
        best_s = max(min(cheap_s, longest_s), shortest_s)
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
        return Choice(
            interval_s=interval_s,
            changed=interval_s != current_s,
            reason=f"a save each {duration_text(interval_s)}: {reason}",
            expected_pls=expected,
        )

    def _pls_to_come(self, measured: Measured, interval_s: float) -> float:
        """Expected of the rest of the run: formula 3 for the share that is left."""
        lost_s = interval_s / 2 + measured.delay_s
        return measured.share_left * lost_s / (self.time_to_loss_s(measured) * measured.nodes)

    def _longest(self, measured: Measured) -> float:
        """The interval with which the whole run is expected to end at the target; not positive: none does."""
        if measured.share_left == 0:
            return float("inf")
        to_lose = (self.target_pls - measured.pls) / measured.share_left  # of what is to come
        return 2 * (to_lose * self.time_to_loss_s(measured) * measured.nodes - measured.delay_s)

    def _why_target(self, measured: Measured) -> str:
        return (
            f"the target PLS of {self.target_pls:g} asks for it; {measured.pls:.3g} so far, "
            f"{measured.share_left:.0%} of the samples to come, and one of {measured.nodes} nodes is lost "
            f"each {duration_text(self.time_to_loss_s(measured))}"
        )

    def _why_too_slow(self, measured: Measured, expected: float) -> str:
        return (
            f"as often as storage takes them, at {duration_text(measured.save_s)} a save; the target PLS of "
            f"{self.target_pls:g} asks for more, and {expected:.3g} is to be expected "
            f"({measured.pls:.3g} so far)"
        )
