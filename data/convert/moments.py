"""Mean and standard deviation of float32 columns, exact: rows may be added in any order and grouping.

Sums of floats depend on the order of addition, and with it on memory and processes. A float32 is a whole
number of 2^-149, so that sums of values and of squares are whole numbers, which Python adds exactly.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

import numpy as np
from numpy.typing import NDArray

_MANTISSA_BITS: Final = 24
_HALF_BITS: Final = 12
_SCALE_BITS: Final = 173
"""Sums are in units of 2^-173, so that no shift below is negative."""


@dataclass(frozen=True)
class Moments:
    """Number, sum and sum of squares of values, in units of 2^-173 and 2^-346."""

    count: int = 0
    total: int = 0
    squares: int = 0

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> "Moments":
        """Moments of finite values, at most 2^29 of them."""
        fractions, exponents = np.frexp(values.astype(np.float64))
        mantissas = np.ldexp(fractions, _MANTISSA_BITS)  # whole numbers
        high = np.trunc(mantissas / 2**_HALF_BITS)
        low = mantissas - high * 2**_HALF_BITS
        least = int(exponents.min(initial=0))

        def summed(weights: NDArray[np.float64]) -> list[int]:
            return [int(one) for one in np.bincount(exponents - least, weights)]  # exact below 2^53

        shifts = [least + at - _MANTISSA_BITS + _SCALE_BITS for at in range(len(summed(mantissas)))]
        total = sum(part << shift for part, shift in zip(summed(mantissas), shifts, strict=True))
        squares = 0
        for weights, bits in ((high * high, 2 * _HALF_BITS), (2 * high * low, _HALF_BITS), (low * low, 0)):
            parts = zip(summed(weights), shifts, strict=True)
            squares += sum(part << (2 * shift + bits) for part, shift in parts)
        return cls(len(values), total, squares)

    @classmethod
    def sum(cls, parts: Iterable["Moments"]) -> "Moments":
        """Moments of all values together."""
        listed = list(parts)
        return cls(
            sum(part.count for part in listed),
            sum(part.total for part in listed),
            sum(part.squares for part in listed),
        )

    @property
    def mean(self) -> float:
        """Mean, rounded once."""
        return float(self._mean)

    @property
    def std(self) -> float:
        """Standard deviation (of the population); 1 where all values are equal."""
        variance = Fraction(self.squares, max(self.count, 1) << (2 * _SCALE_BITS)) - self._mean**2
        return math.sqrt(variance) or 1.0

    @property
    def _mean(self) -> Fraction:
        return Fraction(self.total, max(self.count, 1) << _SCALE_BITS)
