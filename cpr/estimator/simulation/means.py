"""Means over simulated runs, and how sure they are."""

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Mean:
    """A mean with its 95 % confidence interval (Student's t)."""

    value: float
    half_width: float
    """Of the interval, which is `value` plus and minus this."""

    @classmethod
    def of(cls, values: ArrayLike) -> "Mean":
        """Of independent values, two at least.

        >>> mean = Mean.of([1.0, 2.0, 3.0])
        >>> f"{mean.value:.2f} +- {mean.half_width:.2f}"
        '2.00 +- 2.48'
        """
        numbers = np.asarray(values, np.float64)
        spread = float(numbers.std(ddof=1)) / math.sqrt(len(numbers))
        reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, len(numbers) - 1))
        return cls(float(numbers.mean()), reach * spread)

    @property
    def low(self) -> float:
        """Of the interval."""
        return self.value - self.half_width

    @property
    def high(self) -> float:
        """Of the interval."""
        return self.value + self.half_width

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {"mean": self.value, "half_width_95": self.half_width}
