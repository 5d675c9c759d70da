"""Analysis of a failure log: mean time between failures, its uncertainty, and the distribution that fits."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from cpr.estimator.failures.arrivals import Distribution
from cpr.estimator.failures.fits import FEWEST, Fit, fit, fit_all, mean_time_interval, p_value
from cpr.estimator.failures.log import FailureLog
from cpr.humanize import count_text, duration_text

TELLS: Final = 2.0
"""Smallest difference in Akaike's criterion that means something."""
DOUBTFUL: Final = 0.05
"""p-value below which a fit does not describe the failures."""


@dataclass(frozen=True, kw_only=True)
class LogReport:
    """A failure log with its fits."""

    log: FailureLog
    interval_s: tuple[float, float]
    """95% interval of the mean time between failures, if failures are memoryless."""
    fits: Sequence[Fit]
    """The best first; empty without failures, only the exponential with few of them."""
    p_value: float | None
    """Of the best fit; None if there are too few failures to compute one."""

    @property
    def is_random(self) -> bool:
        """Whether no other distribution is clearly better than the (memoryless) exponential one."""
        plain = next((fit.aic for fit in self.fits if fit.distribution == "exponential"), 0.0)
        return not self.fits or plain < self.fits[0].aic + TELLS

    def __str__(self) -> str:
        low, high = (duration_text(bound) for bound in self.interval_s)
        seen = f"{count_text(self.log.num_failures, 'failure')} in {duration_text(self.log.exposure_s)}"
        lines = [f"  {seen}: the mean time between them is {low} to {high} (95%, if they come at random)."]
        if self.log.num_failures < FEWEST:
            lines.append(f"  Too few to tell how they come: that takes {FEWEST}.")
            return "\n".join(lines)
        lines += [
            f"  {fit.distribution:<11}  shape {fit.shape:<5.2g}  mean {duration_text(fit.mean_s):<8}  "
            f"log likelihood {fit.log_likelihood:.1f}  AIC {fit.aic:.1f}  largest distance {fit.distance:.2f}"
            for fit in self.fits
        ]
        return "\n".join([*lines, f"  {self._verdict(self.p_value)}"])

    def _verdict(self, p: float | None) -> str:
        best = self.fits[0]
        if p is None:
            return "Whether they come like one of these cannot be told: most logs like this one have too few."
        if p < DOUBTFUL:
            return f"None of these describes them (p = {p:.2g}): `cpr simulate` can draw from the log itself."
        if self.is_random:
            return f"They come at random, as far as one can tell (p = {p:.2g} of the best fit)."
        how = "in bursts" if best.shape < 1 else "regularly"
        return (
            f"They come {how}: {best.distribution} with shape {best.shape:.2g} fits best (p = {p:.2g}). The "
            "formulas need only their mean."
        )

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON values; times in seconds."""
        return {
            "num_failures": self.log.num_failures,
            "exposure_s": self.log.exposure_s,
            "mean_time_interval_95_s": list(self.interval_s),
            "fits": [asdict(fit) for fit in self.fits],
            "p_value_of_best": self.p_value,
        }


def report_on(log: FailureLog) -> LogReport:
    """Analyze a failure log."""
    fits = fit_all(log) if log.num_failures else []
    return LogReport(
        log=log,
        interval_s=mean_time_interval(log),
        fits=fits,
        p_value=p_value(log, fits[0]) if log.num_failures >= FEWEST else None,
    )


@dataclass(frozen=True, kw_only=True)
class ChosenDistribution:
    """The distribution of times between failures that a simulation draws from."""

    distribution: Distribution
    shape: float = 1.0
    explanation: str
    """One or two sentences on where the distribution comes from."""


def choose_distribution(log: FailureLog, wanted: Distribution | None) -> ChosenDistribution:
    """Choose a distribution for a simulation after a log with failures in it.

    Args:
        log: of failures.
        wanted: family to fit, whether it describes the log or not; None: the best family, or the recorded
            times themselves if no family describes the log.

    Raises:
        ValueError: the wanted family cannot be fitted to this log.
    """
    if wanted == "recorded":
        return ChosenDistribution(
            distribution="recorded", explanation=f"Failures are drawn from {_recorded(log)}."
        )
    found = fit_all(log)[0] if wanted is None else fit(log, wanted)
    p = p_value(log, found) if log.num_failures >= FEWEST else None
    judged = "too few to judge that" if p is None else f"p = {p:.2g}"
    fitted = (
        f"{found.distribution} of shape {found.shape:.3g} and mean {duration_text(found.mean_s)}, fitted to "
        f"{count_text(log.num_failures, 'failure')} ({judged})"
    )
    text = f"Failures are drawn from {fitted}, with T_fail as their mean"
    if p is not None and p < DOUBTFUL:
        if wanted is None:
            text = f"No distribution describes these failures; the best is {fitted}. So they are drawn from "
            return ChosenDistribution(distribution="recorded", explanation=f"{text}{_recorded(log)}.")
        text += "; but they hardly come like that: --distribution recorded draws from the log itself"
    return ChosenDistribution(distribution=found.distribution, shape=found.shape, explanation=f"{text}.")


def _recorded(log: FailureLog) -> str:
    text = f"{count_text(log.num_failures, 'recorded time')} between them, with T_fail as their mean"
    if log.unfinished_s:
        text += f"; {count_text(len(log.unfinished_s), 'time')} that no failure ended cannot be among them"
    return text
