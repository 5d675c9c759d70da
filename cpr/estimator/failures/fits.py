"""Distributions fitted to the times between failures, and goodness of fit.

Maximum likelihood; times that no failure has ended yet are right-censored. The formulas need only the mean;
the shape tells whether failures come in bursts, and is what `cpr simulate` draws from. `scipy.stats` fits
censored data as well, but with unbounded shapes (regular failures drive them to infinity) and an order of
magnitude slower, which the 99 fits of `p_value` would feel.
"""

import contextlib
import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from cpr.estimator.failures.arrivals import SHAPES
from cpr.estimator.failures.log import FailureLog, Stretch

Distribution = Literal["exponential", "gamma", "weibull"]
FEWEST: Final = 5
"""Fewest failures from which a shape can be estimated."""
REPLICATIONS: Final = 99
MOST_DRAWS: Final = 4 * REPLICATIONS
"""Limit of simulated logs, of which only those with `FEWEST` failures count as replications."""
SMALLEST_S: Final = 1e-6
"""Lower limit of simulated times: in bursts of failures, tiny times would be rounded to 0."""
CONFIDENCE: Final = 0.95
_SEARCHED: Final = (math.log(SHAPES[0] / 10), math.log(SHAPES[1] * 10))
"""Search range of the logarithm of the shape."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A fitted distribution of the time between failures."""

    distribution: Distribution
    shape: float
    """Below 1: failures come in bursts; 1: memoryless (always so for exponential); above 1: regularly."""
    mean_s: float
    log_likelihood: float
    aic: float
    """Akaike's criterion: lower is better; a difference below 2 is meaningless."""
    distance: float
    """Largest distance from the Kaplan-Meier estimate of the distribution function (Kolmogorov-Smirnov)."""

    @property
    def scale_s(self) -> float:
        """Scale parameter; the exponential distribution is a Weibull distribution of shape 1."""
        of_one = self.shape if self.distribution == "gamma" else math.gamma(1 + 1 / self.shape)
        return self.mean_s / of_one

    def cdf(self, times_s: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distribution function of the time between failures."""
        times = times_s / self.scale_s
        if self.distribution == "gamma":
            return np.asarray(special.gammainc(self.shape, times))
        return -np.expm1(-(times**self.shape))

    def draw(self, size: int, random: np.random.Generator) -> NDArray[np.float64]:
        """Draw `size` times between failures, in seconds."""
        draw = random.standard_gamma if self.distribution == "gamma" else random.weibull
        return draw(self.shape, size) * self.scale_s

    def log_likelihood_of(self, gaps_s: NDArray[np.float64], unfinished_s: NDArray[np.float64]) -> float:
        """Log likelihood of times between failures and of right-censored times."""
        gaps, unfinished = gaps_s / self.scale_s, unfinished_s / self.scale_s
        density = (self.shape - 1) * np.log(gaps).sum() - len(gaps) * math.log(self.scale_s)
        if self.distribution == "gamma":
            density -= gaps.sum() + len(gaps) * math.lgamma(self.shape)
            return float(density + np.log(special.gammaincc(self.shape, unfinished)).sum())
        density += len(gaps) * math.log(self.shape)
        return float(density - (gaps**self.shape).sum() - (unfinished**self.shape).sum())


def fit(log: FailureLog, distribution: Distribution) -> Fit:
    """Fit one family by maximum likelihood.

    Raises:
        ValueError: there are too few failures, or the most likely shape is outside of `SHAPES`.
    """
    least = 1 if distribution == "exponential" else FEWEST
    if log.num_failures < least:
        raise ValueError(f"{log.num_failures} failures are too few to fit a distribution; it takes {least}")
    found = _most_likely(log, distribution)
    if not SHAPES[0] <= found.shape <= SHAPES[1]:
        raise ValueError(
            f"no {distribution} distribution describes these failures: the times between them are too nearly "
            "equal, or too unequal; `cpr simulate --distribution recorded` draws from them as they are"
        )
    return found


def _most_likely(log: FailureLog, distribution: Distribution) -> Fit:
    """The most likely distribution of a family, with a shape at most a little outside of `SHAPES`."""
    gaps_s, unfinished_s = np.array(log.gaps_s), np.array(log.unfinished_s)
    at_random = Fit(
        distribution=distribution,
        shape=1.0,
        mean_s=log.exposure_s / log.num_failures,
        log_likelihood=0.0,
        aic=0.0,
        distance=0.0,
    )
    if distribution == "exponential":
        return _judged(at_random, log)

    def at(point: NDArray[np.float64]) -> Fit:
        # logarithms keep both parameters positive, and the search well scaled
        shape, mean = map(float, np.exp(point))
        return replace(at_random, shape=shape, mean_s=mean * at_random.mean_s)

    with np.errstate(all="ignore"):  # far from the maximum, likelihoods are 0
        found = optimize.minimize(
            lambda point: -at(point).log_likelihood_of(gaps_s, unfinished_s),
            (0.0, 0.0),
            method="Nelder-Mead",
            bounds=[_SEARCHED, (None, None)],
            options={"initial_simplex": [(0.0, 0.0), (0.5, 0.0), (0.0, 0.5)], "xatol": 1e-6, "fatol": 1e-9},
        )
    return _judged(at(found.x), log)


def fit_all(log: FailureLog) -> list[Fit]:
    """Fit all families that can be fitted, sorted by Akaike's criterion."""
    found = [fit(log, "exponential")]
    families: tuple[Distribution, ...] = ("gamma", "weibull")
    for family in families if log.num_failures >= FEWEST else ():
        with contextlib.suppress(ValueError):  # failures too regular for this family
            found.append(fit(log, family))
    return sorted(found, key=lambda each: each.aic)


def p_value(log: FailureLog, found: Fit, seed: int = 0) -> float | None:
    """p-value of a fit's distance, by a parametric bootstrap.

    Logs of the same length are drawn from the fit and fitted themselves. Logs with fewer than `FEWEST`
    failures do not count.

    Returns:
        The p-value; None if most simulated logs have too few failures.

    Raises:
        ValueError: the log has too few failures.
    """
    if log.num_failures < FEWEST:
        raise ValueError(f"{log.num_failures} failures are too few to judge a fit; it takes {FEWEST}")
    random = np.random.default_rng(seed)
    larger = total = 0
    for _ in range(MOST_DRAWS):
        drawn = _drawn(log, found, random)
        if drawn.num_failures < FEWEST:
            continue
        larger += _most_likely(drawn, found.distribution).distance >= found.distance
        total += 1
        if total == REPLICATIONS:
            return (1 + larger) / (1 + total)
    return None


def kaplan_meier(log: FailureLog) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Kaplan-Meier estimate: the times between failures, and the distribution function from each on."""
    gaps, unfinished = np.sort(log.gaps_s), np.sort(log.unfinished_s)
    times, ended = np.unique(gaps, return_counts=True)
    at_risk = len(gaps) + len(unfinished) - np.searchsorted(gaps, times) - np.searchsorted(unfinished, times)
    return times, 1 - np.cumprod(1 - ended / at_risk)


def mean_time_interval(log: FailureLog) -> tuple[float, float]:
    """95 % credible interval of the mean time to failure, seconds.

    Exact for memoryless failures, however few: with Jeffreys' prior the rate has a gamma distribution.
    Failures in bursts are less certain than that.
    """
    rate = stats.gamma(log.num_failures + 0.5, scale=1 / log.exposure_s)
    tail = (1 - CONFIDENCE) / 2
    return float(1 / rate.ppf(1 - tail)), float(1 / rate.ppf(tail))


def _judged(found: Fit, log: FailureLog) -> Fit:
    likelihood = found.log_likelihood_of(np.array(log.gaps_s), np.array(log.unfinished_s))
    times, over = kaplan_meier(log)
    # the estimate is a step function: the largest distance is just before or at a step
    before = np.concatenate([[0.0], over[:-1]])
    expected = found.cdf(times)
    distance = float(np.max(np.maximum(np.abs(over - expected), np.abs(before - expected))))
    num_parameters = 1 if found.distribution == "exponential" else 2
    aic = 2 * num_parameters - 2 * likelihood
    return replace(found, log_likelihood=likelihood, aic=aic, distance=distance)


def _drawn(log: FailureLog, found: Fit, random: np.random.Generator) -> FailureLog:
    """Draw a log of the same length as `log` from a fitted distribution."""

    def draw(size: int) -> NDArray[np.float64]:
        return np.maximum(found.draw(size, random), SMALLEST_S)

    stretches = []
    for stretch in log.stretches:
        if stretch.unfinished_s == 0:  # observation ended with a failure: keep the number of failures instead
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
