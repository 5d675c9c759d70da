"""Popularity of the ids of a table: a power law, sampled without a table of probabilities.

Ids are numbered by popularity, as a vocabulary sorted by frequency would number them: id 1 is the
most popular one, id 0 is kept for missing values. With `rows` rows and exponent `s`,

    P(id <= k) = (1 - (k + 1)^(1 - s)) / (1 - rows^(1 - s)),        k = 0 .. rows - 1,

which is the continuous power law x^-s on [1, rows), rounded down. Its inverse is a formula, so a
table of fifty million rows costs no memory. The exponent follows from the wanted skew.
"""

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from data.synthetic.profile import TOP_COVERAGE, TOP_SHARE

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

SOLVED_FROM_ROWS: Final = 1000
"""Smaller tables have too few ids for a top percent: they take the exponent of a table of this size."""


class Popularity:
    """The power law of one table.

    Args:
        rows: rows of the table, row 0 (missing values) included; at least 2.
        top_coverage: share of the accesses that the top `TOP_SHARE` of ids get.
    """

    def __init__(self, rows: int, top_coverage: float = TOP_COVERAGE) -> None:
        self.rows = rows
        self.exponent = solve_exponent(max(rows, SOLVED_FROM_ROWS), top_coverage)
        self._power = 1 - self.exponent
        self._span = math.expm1(self._power * math.log(rows))

    def ids(self, uniform: Floats) -> Ints:
        """The ids at these quantiles.

        Args:
            uniform: float64 in [0, 1), any shape.

        Returns:
            int64 ids in [1, rows), same shape.
        """
        value = np.multiply(uniform, self._span)
        np.log1p(value, out=value)
        value /= self._power
        np.exp(value, out=value)
        return np.clip(value.astype(np.int64), 1, self.rows - 1)

    def coverage(self, top: int | Ints) -> Floats:
        """Share of the accesses that go to ids 1 to `top`."""
        return np.asarray(np.expm1(self._power * np.log1p(top)) / self._span)

    def probabilities(self, num_ids: int) -> Floats:
        """Share of the accesses that go to each of the ids 1 to `num_ids`, float64 `[num_ids]`."""
        return np.diff(self.coverage(np.arange(num_ids + 1)))


def solve_exponent(rows: int, top_coverage: float = TOP_COVERAGE) -> float:
    """The exponent with which the top `TOP_SHARE` of ids get `top_coverage` of the accesses.

    By bisection: coverage grows with the exponent. Small tables need steep laws (1.4 at a thousand
    rows), the largest ones of Criteo Terabyte come close to 1.
    """
    top, low, high = math.log(1 + TOP_SHARE * (rows - 1)), 0.1, 8.0
    for _ in range(60):
        middle = (low + high) / 2
        power = 1 - middle or 1e-12
        if math.expm1(power * top) / math.expm1(power * math.log(rows)) < top_coverage:
            low = middle
        else:
            high = middle
    return low


class MovingPopularity:
    """The same power law while the order of the ids moves from day to day.

    Each day a share `drift` of the traffic moves from the orders of the days before to a new one of
    that day: on day d, the order of day g > 0 rules a share `drift (1 - drift)^(d - g)`, and the
    original one the rest. An order is the affine permutation `1 + (a (id - 1) + b) mod (rows - 1)`.

    Args:
        rows: rows of the table, row 0 included.
        drift: share a day, in [0, 1].
        day: the day, from 0.
        rng: where the orders of the days 1 to `day` come from; the same state for every day.
    """

    def __init__(self, rows: int, drift: float, day: int, rng: np.random.Generator) -> None:
        num_ids = rows - 1
        self._num_ids = num_ids
        self._factors, self._offsets = np.ones(day + 1, np.int64), np.zeros(day + 1, np.int64)
        for order in range(1, day + 1):
            factor = int(rng.integers(1, num_ids + 1))
            while math.gcd(factor, num_ids) != 1:
                factor = factor % num_ids + 1
            self._factors[order], self._offsets[order] = factor, rng.integers(num_ids)
        ages = np.arange(day, -1, -1)
        share = drift * (1 - drift) ** ages
        share[0] = (1 - drift) ** day
        self._bounds = np.cumsum(share)[:-1]

    def reorder(self, ids: Ints, uniform: Floats) -> Ints:
        """Ids of the day for `ids` of the standing law; `uniform` in [0, 1) picks an order for each."""
        order = np.searchsorted(self._bounds, uniform, side="right")
        return 1 + (self._factors[order] * (ids - 1) + self._offsets[order]) % self._num_ids
