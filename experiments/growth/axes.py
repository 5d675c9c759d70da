"""The jobs of `experiments.growth`: each axis changes one size of a job and leaves the others."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from experiments.checkpointing.job import TrainingJob


@dataclass(frozen=True, kw_only=True)
class Point:
    """A job, as one value on an axis."""

    axis: str
    value: int
    job: TrainingJob
    world_size: int = 2

    @property
    def key(self) -> str:
        """Unique name."""
        return f"{self.axis} {self.value}"


BASE: Final = TrainingJob(rows=50_000, precision="fp32", steps_before=15)
"""1.3 million rows in 26 tables of 64 columns, batches of 2048, one id a table and sample. In fp32, as not
every processor is faster in mixed precision."""
NUM_TABLES: Final = BASE.num_tables
BIG_ROWS: Final = 1_370_000
"""Rows of each of the 26 tables of the largest job: 35.6 million, 9.3 GB."""


def _points(axis: str, jobs: Mapping[int, TrainingJob]) -> list[Point]:
    return [Point(axis=axis, value=value, job=job) for value, job in jobs.items()]


def rows_points(rows: Sequence[int]) -> list[Point]:
    """Jobs whose 26 tables have these numbers of rows each; the axis counts all rows."""
    return _points("rows", {NUM_TABLES * each: replace(BASE, rows=each) for each in rows})


BIG: Final = Point(axis="rows", value=NUM_TABLES * BIG_ROWS, job=replace(BASE, rows=BIG_ROWS))
"""The largest job, of `experiments.full_size`."""

AXES: Final[Sequence[Point]] = [
    *rows_points([4_000, 40_000, 220_000, 660_000]),
    BIG,
    # a small batch, since the interactions of DLRM, and the layer after them, grow with the square
    *_points(
        "tables",
        {each: replace(BASE, num_tables=each, rows=10_000, global_batch_size=256) for each in (26, 100, 400)},
    ),
    *_points("columns", {each: replace(BASE, columns=each) for each in (16, 64, 256)}),
    *_points("batch", {each: replace(BASE, global_batch_size=each) for each in (128, 2048, 16_384, 65_536)}),
    *_points("ids", {each: replace(BASE, ids_per_sample=each) for each in (1, 26, 104, 208)}),
    *[Point(axis="ranks", value=each, job=BASE, world_size=each) for each in (1, 2, 4, 8)],
]
