"""How failures come: distributions fitted to the times between them, and how well they fit.

Maximum likelihood, with times that no failure has ended yet as right-censored ones. The formulas need only
the mean; the shape tells whether failures come in bursts, and is what `cpr simulate` draws from.
"""

import contextlib
import math
import warnings
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from cpr.estimator.arrivals import SHAPES
from cpr.estimator.failures import FailureLog, Stretch

Distribution = Literal["exponential", "gamma", "weibull"]
FEWEST: Final = 5
"""With fewer failures a shape means nothing."""
REPLICATIONS: Final = 99
MOST_DRAWS: Final = 4 * REPLICATIONS
"""Logs that are drawn at most to get so many that can be judged."""
SMALLEST_S: Final = 1e-6
"""Times that are drawn are at least so long: in bursts of failures, tiny ones are rounded to 0."""
CONFIDENCE: Final = 0.95
_FAMILIES: Final[dict[str, Any]] = {"gamma": stats.gamma, "weibull": stats.weibull_min}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A distribution of the time between failures."""

    distribution: Distribution
    shape: float
    """Below 1: failures come in bursts; 1: at random (always so for exponential); above: regularly."""
    mean_s: float
    log_likelihood: float
    aic: float
    """Akaike's criterion, of the times in seconds: lower is better; a difference below 2 says nothing."""
    distance: float
    """Largest one between its distribution function and Kaplan and Meier's estimate (Kolmogorov, Smirnov)."""

    @property
    def frozen(self) -> Any:
        """As a distribution of `scipy.stats`, in seconds."""
        if self.distribution == "exponential":
            return stats.expon(scale=self.mean_s)
        family = _FAMILIES[self.distribution]
        return family(self.shape, scale=self.mean_s / family(self.shape).mean())


def fit(log: FailureLog, distribution: Distribution) -> Fit:
    """The most likely one of a family.

    Raises:
        ValueError: there are too few failures for it, or they come too regularly, or too much in bursts.
    """
    least = 1 if distribution == "exponential" else FEWEST
    if log.num_failures < least:
        raise ValueError(f"{log.num_failures} failures are too few to fit a distribution; it takes {least}")
    try:
        found = _most_likely(log, distribution)
    except stats.FitError:  # times that are all equal, for one
        found = None
    if found is None or not SHAPES[0] <= found.shape <= SHAPES[1]:
        raise ValueError(
            f"no {distribution} distribution describes these failures: the times between them are too nearly "
            "equal, or too unequal; `cpr simulate --distribution recorded` draws from them as they are"
        )
    return found


def _most_likely(log: FailureLog, distribution: Distribution) -> Fit:
    unit_s = log.exposure_s / log.num_failures  # numbers near 1, for the optimizer's sake
    gaps, unfinished = np.array(log.gaps_s) / unit_s, np.array(log.unfinished_s) / unit_s
    shape, scale = 1.0, 1.0
    if distribution != "exponential":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of steps that the optimizer takes back
            data = stats.CensoredData(uncensored=gaps, right=unfinished)
            shape, _, scale = _FAMILIES[distribution].fit(data, floc=0)
    mean = scale * (1.0 if distribution == "exponential" else float(_FAMILIES[distribution](shape).mean()))
    found = Fit(
        distribution=distribution,
        shape=float(shape),
        mean_s=float(mean * unit_s),
        log_likelihood=0.0,
        aic=0.0,
        distance=0.0,
    )
    return _judged(found, log)


def fit_all(log: FailureLog) -> list[Fit]:
    """All families that can be fitted to so many failures, the best by Akaike's criterion first."""
    found = [fit(log, "exponential")]
    families: tuple[Distribution, ...] = ("gamma", "weibull")
    for family in families if log.num_failures >= FEWEST else ():
        with contextlib.suppress(ValueError):  # too regular for it
            found.append(fit(log, family))
    return sorted(found, key=lambda each: each.aic)


def p_value(log: FailureLog, found: Fit, seed: int = 0) -> float | None:
    """How probable a distance as large as the fit's is, if failures do come like that; small: they do not.

    By a parametric bootstrap: as many logs, watched as long, are drawn from the fit and fitted themselves.
    Those with too few failures for that do not count, so the answer is about logs that can be judged.

    Returns:
        None: it cannot be told, because most logs that are drawn have too few failures.

    Raises:
        ValueError: there are too few failures to tell.
    """
    if log.num_failures < FEWEST:
        raise ValueError(f"{log.num_failures} failures are too few to judge a fit; it takes {FEWEST}")
    random = np.random.default_rng(seed)
    larger = total = 0
    for _ in range(MOST_DRAWS):
        drawn = _drawn(log, found, random)
        if drawn.num_failures < FEWEST:
            continue
        try:
            larger += _most_likely(drawn, found.distribution).distance >= found.distance
        except stats.FitError:
            continue
        total += 1
        if total == REPLICATIONS:
            return (1 + larger) / (1 + total)
    return None


def kaplan_meier(log: FailureLog) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shares of the times between failures that are over: at the times, and from there on until the next."""
    gaps, unfinished = np.sort(log.gaps_s), np.sort(log.unfinished_s)
    times, ended = np.unique(gaps, return_counts=True)
    at_risk = (len(gaps) - np.searchsorted(gaps, times)) + (
        len(unfinished) - np.searchsorted(unfinished, times)
    )
    return times, 1 - np.cumprod(1 - ended / at_risk)


def mean_time_interval(log: FailureLog) -> tuple[float, float]:
    """Between which mean times to failure, in seconds, the true one lies with a probability of 95 %.

    Exact for failures that come at random, however few: the rate's posterior is a gamma distribution, from
    Jeffreys' prior. Failures that come in bursts leave it less certain than that.
    """
    rate = stats.gamma(log.num_failures + 0.5, scale=1 / log.exposure_s)
    tail = (1 - CONFIDENCE) / 2
    return float(1 / rate.ppf(1 - tail)), float(1 / rate.ppf(tail))


def _judged(found: Fit, log: FailureLog) -> Fit:
    frozen = found.frozen
    likelihood = float(frozen.logpdf(log.gaps_s).sum() + frozen.logsf(log.unfinished_s).sum())
    times, over = kaplan_meier(log)
    before = np.concatenate([[0.0], over[:-1]])
    expected = frozen.cdf(times)
    distance = float(np.max(np.maximum(np.abs(over - expected), np.abs(before - expected))))
    num_parameters = 1 if found.distribution == "exponential" else 2
    return Fit(
        distribution=found.distribution,
        shape=found.shape,
        mean_s=found.mean_s,
        log_likelihood=likelihood,
        aic=2 * num_parameters - 2 * likelihood,
        distance=distance,
    )


def _drawn(log: FailureLog, found: Fit, random: np.random.Generator) -> FailureLog:
    """A log like this one, in a world where failures come as in the fit."""
    frozen, stretches = found.frozen, []

    def draw(size: int) -> NDArray[np.float64]:
        drawn: NDArray[np.float64] = np.maximum(frozen.rvs(size, random_state=random), SMALLEST_S)
        return drawn

    for stretch in log.stretches:
        if stretch.unfinished_s == 0:  # watching ended with so many failures, however long that took
            stretches.append(Stretch(tuple(draw(len(stretch.gaps_s)))))
            continue
        watched_s = sum(stretch.gaps_s) + stretch.unfinished_s
        at_once = 1 + math.ceil(watched_s / found.mean_s)
        gaps = draw(at_once)
        while gaps.sum() < watched_s:
            gaps = np.concatenate([gaps, draw(at_once)])
        ends_s = np.cumsum(gaps)
        num_gaps = int(np.searchsorted(ends_s, watched_s))
        left_s = watched_s - (ends_s[num_gaps - 1] if num_gaps else 0.0)
        stretches.append(Stretch(tuple(gaps[:num_gaps]), float(left_s)))
    return FailureLog(tuple(stretches))
