"""The configuration of a synthetic data set, which decides every byte of it."""

from dataclasses import dataclass
from typing import Final

from data.criteo import KAGGLE_CARDINALITIES, TERABYTE_CARDINALITIES
from data.synthetic.profile import TOP_COVERAGE

CARDINALITIES: Final = {"kaggle": KAGGLE_CARDINALITIES, "terabyte": TERABYTE_CARDINALITIES}
COMPRESSIONS: Final = {"none": "", "gz": ".gz", "zst": ".zst"}
FORMATS: Final = ("parquet", "tsv")

LEAST_ROW_BYTES: Final = {"parquet": 25, "multi_hot": 100, "none": 150, "gz": 45, "zst": 35}
"""Lower bound of a sample's bytes on disk: the smallest tables, minus a third; raw files by compression."""
PARQUET_FILE_BYTES: Final = 8192
"""Size of a Parquet file's footer."""

SMALL_TABLE_ROWS: Final = 1000
"""Scaling never makes a table smaller than this; tables that are smaller by nature keep their real size."""

BAG_SIZES: Final = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids a sample has in each feature of MLPerf's multi-hot DLRM-DCNv2 data set."""


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """Everything that decides the bytes of a synthetic data set.

    Raises:
        ValueError: a value is out of range, or two values do not go together.
    """

    preset: str = "kaggle"
    """Data set with the table sizes: `kaggle` or `terabyte`."""
    scale: float = 0.002
    """Factor on the real table sizes, in (0, 1]; no table shrinks below `SMALL_TABLE_ROWS` rows."""
    days: int = 6
    """Number of days."""
    rows_per_day: int = 200_000
    """Samples a day."""
    seed: int = 1
    """Decides the teacher and every sample; not negative."""
    top_coverage: float = TOP_COVERAGE
    """Skew of the ids: share of the accesses that go to the most popular percent of a table's ids, in
    [0.05, 0.99]."""
    drift: float = 0.0
    """How far the world moves a day, in [0, 1]: share of the traffic that moves to a new order of
    popularity, and angle in radians by which the teacher's effects turn. 0 is a world that stands still."""
    multi_hot: bool = False
    """Bags of `BAG_SIZES` ids instead of one id a feature (Parquet only)."""
    format: str = "parquet"
    """`parquet` (what `data.loader` reads) or `tsv` (Criteo's raw format, for `data.prepare`)."""
    compression: str = "none"
    """Of raw files: `none`, `gz` or `zst`. Parquet files always carry their own compression."""
    rows_per_block: int = 16_384
    """Samples drawn from one random stream, and rows of a Parquet row group. The unit of memory."""
    rows_per_file: int = 65_536
    """Samples in a Parquet file, a multiple of `rows_per_block`. Raw files hold a day each."""

    def __post_init__(self) -> None:
        for name, known in (("preset", CARDINALITIES), ("format", FORMATS), ("compression", COMPRESSIONS)):
            value = getattr(self, name)
            _check(value in known, f"{name} is {value!r}; choose one of {[*known]}")
        _check(0 < self.scale <= 1, f"scale is {self.scale}; choose a factor in (0, 1]")
        _check(
            0.05 <= self.top_coverage <= 0.99,
            f"top_coverage is {self.top_coverage}; choose a share of the accesses in [0.05, 0.99]",
        )
        _check(0 <= self.drift <= 1, f"drift is {self.drift}; choose a rate a day in [0, 1]")
        _check(self.seed >= 0, f"seed is {self.seed}; choose a whole number from 0 up")
        for name in ("days", "rows_per_day", "rows_per_block", "rows_per_file"):
            _check(getattr(self, name) > 0, f"{name} is {getattr(self, name)}; choose at least 1")
        _check(
            self.rows_per_file % self.rows_per_block == 0,
            f"rows_per_file is {self.rows_per_file}; choose a multiple of rows_per_block, "
            f"which is {self.rows_per_block}",
        )
        if self.format == "parquet":
            _check(self.compression == "none", "Parquet compresses by itself: leave out the compression")
        else:
            _check(not self.multi_hot, "Criteo's raw format has one id a feature: use Parquet for multi-hot")

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows of each feature's table, including row 0, which stands for a missing value."""
        return tuple(
            min(real, max(SMALL_TABLE_ROWS, round(self.scale * real))) for real in CARDINALITIES[self.preset]
        )

    @property
    def bag_sizes(self) -> tuple[int, ...]:
        """Ids a sample has in each feature, where the feature is not missing."""
        return BAG_SIZES if self.multi_hot else (1,) * len(BAG_SIZES)

    @property
    def least_bytes(self) -> int:
        """Lower bound of the data set's size on disk."""
        kind = "multi_hot" if self.multi_hot else "parquet" if self.format == "parquet" else self.compression
        files_per_day = -(-self.rows_per_day // self.rows_per_file) if self.format == "parquet" else 1
        file_bytes = PARQUET_FILE_BYTES if self.format == "parquet" else 0
        return self.days * (self.rows_per_day * LEAST_ROW_BYTES[kind] + files_per_day * file_bytes)

    def blocks_of_day(self) -> list[int]:
        """Samples in each block of a day; all but the last are full."""
        full, rest = divmod(self.rows_per_day, self.rows_per_block)
        return [self.rows_per_block] * full + [rest] * (rest > 0)


def _check(good: bool, message: str) -> None:
    if not good:
        raise ValueError(message)
