"""Generates samples in memory: any block of any day, reproducibly.

A block draws from its own random stream, keyed by (seed, day, block), so blocks can be made in any
order and by any number of processes. The bytes also depend on NumPy's streams and elementary
functions: across NumPy versions or kinds of processor, expect equal statistics, not equal bytes.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from data.criteo import NUM_CATEGORIES, NUM_DENSE
from data.synthetic import profile
from data.synthetic.calibration import Calibration
from data.synthetic.config import SyntheticConfig
from data.synthetic.popularity import MovingPopularity, Popularity
from data.synthetic.teacher import Bag, Teacher

EFFECTS_STREAM: Final = 0
CALIBRATION_STREAM: Final = 1
POPULARITY_STREAM: Final = 2
BLOCK_STREAM: Final = 3

NUM_CALIBRATION_ROWS: Final = 16_384


@dataclass(frozen=True, kw_only=True)
class Block:
    """`n` consecutive samples.

    Attributes:
        labels: int8 `[n]`, 0 or 1, drawn from `probabilities`.
        probabilities: float64 `[n]`, the teacher's: the best score that any model could give.
        integers: int64 `[n, 13]`, raw; meaningless where missing. Like the next two, the transpose of
            an array that holds column after column, as files want it.
        integers_missing: bool `[n, 13]`.
        dense: float32 `[n, 13]`, `log(max(integer, 0) + 1)`, 0 where missing: what a model sees.
        bags: the ids of each of the 26 features.
    """

    labels: npt.NDArray[np.int8]
    probabilities: npt.NDArray[np.float64]
    integers: npt.NDArray[np.int64]
    integers_missing: npt.NDArray[np.bool_]
    dense: npt.NDArray[np.float32]
    bags: tuple[Bag, ...]

    def __len__(self) -> int:
        return len(self.labels)


class ClickSource:
    """Draws the blocks of one configuration.

    Args:
        config: which samples. Its format and compression do not matter here.
    """

    def __init__(self, config: SyntheticConfig) -> None:
        self.config = config
        self.popularity = tuple(Popularity(rows, config.top_coverage) for rows in config.table_rows)
        self._day = -1
        self._enter(0)
        rng = self._stream(CALIBRATION_STREAM)
        _, _, dense = self._draw_integers(rng, NUM_CALIBRATION_ROWS)
        self._calibration = Calibration.fit(
            *self._teacher.score(dense, self._draw_bags(rng, NUM_CALIBRATION_ROWS))
        )

    def block(self, day: int, index: int) -> Block:
        """Block `index` of day `day`.

        Raises:
            IndexError: the day has no such block.
        """
        num_rows = self.config.blocks_of_day()[index]
        self._enter(day)
        rng = self._stream(BLOCK_STREAM, day, index)
        integers, missing, dense = self._draw_integers(rng, num_rows)
        bags = self._draw_bags(rng, num_rows)
        probabilities = self._calibration.probabilities(self._teacher.score(dense, bags))
        return Block(
            labels=(rng.random(num_rows) < probabilities).astype(np.int8),
            probabilities=probabilities,
            integers=integers,
            integers_missing=missing,
            dense=dense,
            bags=bags,
        )

    def _stream(self, *key: int) -> np.random.Generator:
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(self.config.seed, spawn_key=key)))

    def _enter(self, day: int) -> None:
        """Bring effects and popularity to `day`; without drift every day is like the first."""
        config = self.config
        if self._day == day or (self._day >= 0 and not config.drift):
            return
        self._day = day
        missing = (0.0,) * len(config.table_rows) if config.multi_hot else profile.CATEGORY_MISSING
        streams = self._stream(EFFECTS_STREAM, 0), self._stream(EFFECTS_STREAM, 1)
        self._teacher = Teacher(self.popularity, missing, streams, angle=config.drift * day)
        self._moves = [
            MovingPopularity(rows, config.drift, day, self._stream(POPULARITY_STREAM, feature))
            for feature, rows in enumerate(config.table_rows if config.drift else ())
        ]

    def _draw_integers(
        self, rng: np.random.Generator, num_rows: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
        """Raw integers, where they are missing, and what a model sees of them; each `[num_rows, 13]`."""
        missing = rng.random((NUM_DENSE, num_rows), np.float32) < _column(profile.DENSE_MISSING)
        counts = rng.standard_normal((NUM_DENSE, num_rows), np.float32)
        counts *= _column(profile.DENSE_SIGMA)
        np.exp(counts, out=counts)
        counts *= _column(profile.DENSE_MEDIAN)
        np.minimum(counts, np.float32(profile.DENSE_LIMIT), out=counts)
        integers = counts.astype(np.int64)
        integers += np.array(profile.DENSE_SHIFT)[:, None]
        seen = np.maximum(integers, 0, dtype=np.float64)
        seen += 1
        dense = np.log(seen, out=seen).astype(np.float32)
        dense[missing] = 0
        return integers.T, missing.T, dense.T

    def _draw_bags(self, rng: np.random.Generator, num_rows: int) -> tuple[Bag, ...]:
        """The ids of each feature."""
        draw = self._draw_bag if self.config.multi_hot else self._draw_single_ids
        return tuple(draw(rng, num_rows, feature) for feature in range(NUM_CATEGORIES))

    def _draw_single_ids(self, rng: np.random.Generator, num_rows: int, feature: int) -> Bag:
        """One id a sample: the lower quantiles stand for missing values, the others pick an id."""
        absent = profile.CATEGORY_MISSING[feature]
        uniform = (rng.random(num_rows) - absent) / (1 - absent)
        ids = self._ids(rng, feature, np.maximum(uniform, 0))
        ids[uniform < 0] = 0
        return Bag(ids)

    def _draw_bag(self, rng: np.random.Generator, num_rows: int, feature: int) -> Bag:
        """As many ids as the feature's bags hold, or none."""
        absent = profile.CATEGORY_MISSING[feature]
        lengths = np.where(rng.random(num_rows) < absent, 0, self.config.bag_sizes[feature])
        return Bag(self._ids(rng, feature, rng.random(int(lengths.sum()))), lengths)

    def _ids(
        self, rng: np.random.Generator, feature: int, uniform: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.int64]:
        ids = self.popularity[feature].ids(uniform)
        return self._moves[feature].reorder(ids, rng.random(len(ids))) if self._moves else ids


def _column(values: tuple[float, ...]) -> npt.NDArray[np.float32]:
    return np.array(values, np.float32)[:, None]
