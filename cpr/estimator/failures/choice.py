"""What a simulation draws the times between failures from, after a log of them, and how well that fits."""

from dataclasses import dataclass

from cpr.estimator.failures import arrivals, fits
from cpr.estimator.failures.log import FailureLog
from cpr.estimator.failures.report import DOUBTFUL
from cpr.humanize import count_text, duration_text


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A distribution of the time between failures, whose mean is the job's, and where it comes from."""

    distribution: arrivals.Distribution
    shape: float = 1.0
    told: str
    """A sentence or two about it."""


def choose(log: FailureLog, wanted: arrivals.Distribution | None) -> Drawn:
    """A distribution after a log with failures in it.

    Args:
        log: of failures.
        wanted: of this family, whether it fits or not; None: the best, and where none describes the log, the
            recorded times themselves.

    Raises:
        ValueError: that family cannot be fitted to this log.
    """
    if wanted == "recorded":
        return Drawn(distribution="recorded", told=f"Failures are drawn from {_recorded(log)}.")
    found = fits.fit_all(log)[0] if wanted is None else fits.fit(log, wanted)
    p = fits.p_value(log, found) if log.num_failures >= fits.FEWEST else None
    judged = "too few to judge that" if p is None else f"p = {p:.2g}"
    fitted = (
        f"{found.distribution} of shape {found.shape:.3g} and mean {duration_text(found.mean_s)}, fitted to "
        f"{count_text(log.num_failures, 'failure')} ({judged})"
    )
    if p is None or p >= DOUBTFUL:
        told = f"Failures are drawn from {fitted}, with T_fail as their mean."
    elif wanted is None:
        told = f"No distribution describes these failures; the best is {fitted}. So they are drawn from "
        return Drawn(distribution="recorded", told=f"{told}{_recorded(log)}.")
    else:
        told = (
            f"Failures are drawn from {fitted}, with T_fail as their mean; but they hardly come like that: "
            "--distribution recorded draws from the log itself."
        )
    return Drawn(distribution=found.distribution, shape=found.shape, told=told)


def _recorded(log: FailureLog) -> str:
    text = f"{count_text(log.num_failures, 'recorded time')} between them, with T_fail as their mean"
    if log.unfinished_s:
        text += f"; {count_text(len(log.unfinished_s), 'time')} that no failure ended cannot be among them"
    return text
