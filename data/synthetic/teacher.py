"""The planted teacher: the true click probability of a sample, a function of what a model sees.

The score is that of a factorisation machine (Rendle 2010) over the categories c of a sample and its
transformed integers z, in two parts:

    main  = sum_c w_c + sum_j a_j z_j
    pairs = 1/2 (|t|^2 - sum_c |v_c|^2),    t = sum_c v_c + sum_j z_j u_j

Every id has a main effect w and `NUM_FACTORS` factors v; `pairs` sums the dot products of all pairs
of features, and for integers half their own squares. Under the popularity of the ids the effects of
a table average to zero, hence pairs of categories are pure interactions, which no sum of main effects
can stand in for. Effects shrink towards rare ids, which no model could learn from a few samples. A bag
of ids counts with its mean, an empty bag with zero; row 0 (missing) has effects like any other.

`data.synthetic.calibration` turns the two parts into a probability.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from data.criteo import NUM_DENSE
from data.synthetic.popularity import Popularity
from data.synthetic.profile import DENSE_MEDIAN, DENSE_MISSING, DENSE_SIGMA

NUM_FACTORS: Final = 2
WIDTH: Final = NUM_FACTORS + 2
"""Columns of the effects: main effect, half the squared length of the factors, the factors."""

NUM_EFFECT_ROWS: Final = 65_536
"""Effects kept a table. In larger tables, ids that are equal modulo this number share their effects."""

TABLE_SPREAD: Final = 0.5
"""Tables differ in the size of their main effects: standard deviation of its logarithm ..."""
FACTOR_SPREAD: Final = 1.25
"""... and of the logarithm of the size of their factors: a few tables carry most interactions."""

RARE_RANK: Final = 30.0
"""Rank at which effects begin to shrink: they fall with (1 + rank / RARE_RANK) to the power of ..."""
MAIN_DECAY: Final = 0.25
"""... minus this, for main effects ..."""
FACTOR_DECAY: Final = 0.4
"""... and minus this, for factors: a pair needs both of its ids to be known."""

DENSE_MAIN_SCALE: Final = 0.5
"""Size of the integers' main effects; that of a table is about 1."""
DENSE_FACTOR_SCALE: Final = 0.5
"""Size of the integers' factors; that of a table is about 1."""

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Effects = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bag:
    """The ids that `n` samples have in one feature.

    Attributes:
        ids: int64, sample by sample.
        lengths: int64 `[n]`, ids of each sample; all of one size, or 0 where the feature is missing.
            None: one id a sample, 0 where the feature is missing.
    """

    ids: Ints
    lengths: Ints | None = None


class Teacher:
    """The effects of every id and integer on one day.

    Args:
        tables: the popularity of the ids of each table.
        missing: share of samples that have row 0 of each table.
        draws: two random streams: the effects, and those that they turn to.
        angle: how far they have turned, in radians.
    """

    def __init__(
        self,
        tables: tuple[Popularity, ...],
        missing: tuple[float, ...],
        draws: tuple[np.random.Generator, np.random.Generator],
        angle: float,
    ) -> None:
        effects = _draw_effects(tables, missing, draws[0])
        if angle:
            turned = _draw_effects(tables, missing, draws[1])
            cos, sin = np.float32(np.cos(angle)), np.float32(np.sin(angle))
            effects = [cos * first + sin * second for first, second in zip(effects, turned, strict=True)]
        *self._tables, self._dense = effects
        for table in self._tables:
            _with_squares(table)
        self._mean, self._deviation = _dense_moments()

    def score(self, dense: npt.NDArray[np.float32], bags: tuple[Bag, ...]) -> tuple[Floats, Floats]:
        """Main and pairs part of the score of `n` samples.

        Args:
            dense: float32 `[n, 13]`, transformed.
            bags: the ids of each feature.

        Returns:
            Two float64 arrays `[n]`.
        """
        total = np.zeros((len(dense), WIDTH), np.float32)
        for column, mean, deviation, effect in zip(
            dense.T, self._mean, self._deviation, self._dense, strict=True
        ):
            total += ((column - mean) / deviation)[:, None] * effect
        gathered = np.empty_like(total)
        for table, bag in zip(self._tables, bags, strict=True):
            rows = bag.ids % NUM_EFFECT_ROWS if len(table) == NUM_EFFECT_ROWS else bag.ids
            if bag.lengths is None:
                total += table.take(rows, axis=0, out=gathered, mode="clip")
            elif len(rows):
                bags_of_ids = table.take(rows, axis=0).reshape(-1, bag.lengths.max(), WIDTH)
                total[bag.lengths > 0] += _with_squares(bags_of_ids.mean(1))
        pairs = (total[:, 2:] ** 2).sum(1) / 2 - total[:, 1]
        return total[:, 0].astype(np.float64), pairs.astype(np.float64)


def _draw_effects(
    tables: tuple[Popularity, ...], missing: tuple[float, ...], rng: np.random.Generator
) -> list[Effects]:
    """Effects of each table, float32 `[rows, WIDTH]`, and of the integers, float32 `[13, WIDTH]`."""
    spread = np.array([TABLE_SPREAD, 0] + [FACTOR_SPREAD] * NUM_FACTORS)
    decay = np.array([MAIN_DECAY, 0] + [FACTOR_DECAY] * NUM_FACTORS)
    drawn = []
    for table, absent in zip(tables, missing, strict=True):
        rows = min(table.rows, NUM_EFFECT_ROWS)
        size = np.exp(spread * rng.standard_normal(2).repeat([2, NUM_FACTORS]))
        rarity = (1 + np.arange(rows)[:, None] / RARE_RANK) ** -decay
        effects = rng.standard_normal((rows, WIDTH)) * size * rarity
        accesses = np.concatenate([[absent], (1 - absent) * table.probabilities(rows - 1)])
        # Not `accesses @ effects`: BLAS rounds differently with another number of threads.
        effects -= (accesses[:, None] * effects).sum(0) / accesses.sum()
        drawn.append(effects.astype(np.float32))
    size = np.array([DENSE_MAIN_SCALE, 0] + [DENSE_FACTOR_SCALE] * NUM_FACTORS)
    drawn.append((rng.standard_normal((NUM_DENSE, WIDTH)) * size).astype(np.float32))
    return drawn


def _with_squares(effects: Effects) -> Effects:
    """Half the squared lengths of the factors, written to their column of `effects`."""
    effects[:, 1] = (effects[:, 2:] ** 2).sum(1) / 2
    return effects


def _dense_moments() -> tuple[Floats, Floats]:
    """Mean and standard deviation of each transformed integer, from the law that it is drawn from."""
    normal = np.linspace(-3, 3, 201)[:, None]
    density = np.exp(-(normal**2) / 2)
    values = np.log1p(np.floor(np.array(DENSE_MEDIAN) * np.exp(np.array(DENSE_SIGMA) * normal)))
    weights = density / density.sum() * (1 - np.array(DENSE_MISSING))
    mean = (weights * values).sum(0)
    deviation = np.sqrt((weights * values**2).sum(0) - mean**2)
    return mean.astype(np.float32), deviation.astype(np.float32)
