"""Statistics that experiments share: means, medians and ratios, each with its interval or range."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from cpr.estimator.simulation.simulation import Mean

RESAMPLES: Final = 2000
TIE: Final = 0.05
"""A tie is an interval around 1 that reaches at most this far; a wider one decides nothing."""

Array = npt.NDArray[np.float64]


def bootstrap(
    values: Sequence[float], statistic: Callable[[Array], Any], seed: int = 0
) -> tuple[float, float]:
    """Bounds of the 95 % percentile bootstrap interval of a statistic.

    Args:
        values: the sample.
        statistic: maps resampled values `[RESAMPLES, n]` to their statistics `[RESAMPLES]`.
        seed: of the resampling.
    """
    measured = np.array(values)
    drawn = np.random.default_rng(seed).choice(measured, (RESAMPLES, len(measured)))
    low, high = np.percentile(statistic(drawn), [2.5, 97.5])
    return float(low), float(high)


def median_figures(name: str, values: Sequence[float]) -> dict[str, float]:
    """Figures of a result: the median over rounds, and under `..._low` and `..._high` the extremes."""
    return {name: median(values), f"{name}_low": min(values), f"{name}_high": max(values)}


class Estimate(Mean):
    """A mean over seeds and half the width of its 95 % confidence interval."""

    def figures(self, name: str) -> dict[str, float]:
        """Figures of a result: the mean, and half the width of its interval under `..._ci`."""
        return {name: self.value, f"{name}_ci": self.half_width}


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A statistic and the bounds of its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def figures(self, name: str) -> dict[str, float]:
        """Figures of a result: the value, and its interval under `..._low` and `..._high`."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


class Ratio(Interval):
    """A ratio of two throughputs: median over rounds of the ratio within a round, and its interval."""

    @classmethod
    def of(cls, ratios: Sequence[float]) -> "Ratio":
        """From the ratio of each round, by a bootstrap over rounds."""
        low, high = bootstrap(ratios, lambda drawn: np.median(drawn, axis=1))
        return cls(value=float(np.median(ratios)), low=low, high=high)

    @property
    def reach(self) -> float:
        """Distance from the ratio to the farther end of its interval, as a share of the ratio."""
        return max(self.high / self.value - 1, 1 - self.low / self.value)

    @property
    def is_firm(self) -> bool:
        """Whether the interval excludes 1."""
        return not self.low <= 1 <= self.high

    @property
    def is_tie(self) -> bool:
        """Whether the interval holds 1 and reaches at most `TIE` from there."""
        return not self.is_firm and 1 - self.low <= TIE and self.high - 1 <= TIE

    @property
    def is_hit(self) -> bool:
        """Whether the first throughput is the higher one, or ties with the other."""
        return self.is_tie or self.low > 1
