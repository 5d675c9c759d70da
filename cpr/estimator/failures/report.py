"""What a log of failures says: how often they come, how sure that is, and whether they come at random."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from cpr.estimator.failures.fits import FEWEST, Fit, fit_all, mean_time_interval, p_value
from cpr.estimator.failures.log import FailureLog
from cpr.humanize import count_text, duration_text

TELLS: Final = 2.0
"""A difference in Akaike's criterion that says something."""
DOUBTFUL: Final = 0.05
"""With a smaller p-value, failures hardly come as a fit says."""


@dataclass(frozen=True, kw_only=True)
class FailureReport:
    """A log of failures, judged."""

    log: FailureLog
    interval_s: tuple[float, float]
    """Between which mean times to failure the true one is, with 95 %, if failures come at random."""
    fits: Sequence[Fit]
    """The best first; without failures none, with few of them only the exponential."""
    p_value: float | None
    """Of the best fit; None: it cannot be told from so few failures."""

    @property
    def is_random(self) -> bool:
        """Whether no other distribution is clearly better than the exponential: failures without memory."""
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
        """For machines; times in seconds."""
        return {
            "num_failures": self.log.num_failures,
            "exposure_s": self.log.exposure_s,
            "mean_time_interval_95_s": list(self.interval_s),
            "fits": [asdict(fit) for fit in self.fits],
            "p_value_of_best": self.p_value,
        }


def report_on(log: FailureLog) -> FailureReport:
    """Judge a log of failures."""
    fits = fit_all(log) if log.num_failures else []
    return FailureReport(
        log=log,
        interval_s=mean_time_interval(log),
        fits=fits,
        p_value=p_value(log, fits[0]) if log.num_failures >= FEWEST else None,
    )
