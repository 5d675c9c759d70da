"""Columns of lists as flat values with the length of each row's list."""

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class Ragged:
    """One list of values a row.

    Attributes:
        values: the values of all rows, one after another.
        lengths: int64 `[rows]`.
    """

    values: pl.Series
    lengths: NDArray[np.int64]

    @classmethod
    def of(cls, series: pl.Series) -> "Ragged":
        """Flatten a column of lists; a missing list counts as empty."""
        lengths = series.list.len().fill_null(0).cast(pl.Int64).to_numpy()
        dtype = series.dtype.inner  # type: ignore[attr-defined]  # a List
        flat = pl.from_arrow(series.to_arrow().flatten())
        assert isinstance(flat, pl.Series)
        return cls(flat.cast(dtype), lengths)

    def keep(self, mask: NDArray[np.bool_]) -> "Ragged":
        """Leave out values.

        Args:
            mask: bool `[values]`, False for values to leave out.
        """
        if mask.all():
            return self
        return Ragged(self.values.filter(pl.Series(mask)), self.count(mask))

    def count(self, mask: NDArray[np.bool_]) -> NDArray[np.int64]:
        """Values per row for which `mask`, bool `[values]`, is True."""
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        return np.bincount(rows[mask], minlength=len(self.lengths)).astype(np.int64)

    def series(self, values: pl.Series) -> pl.Series:
        """Column of lists with the lengths of this one, and other values."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths)])
        made = pl.from_arrow(pa.LargeListArray.from_arrays(pa.array(offsets), values.to_arrow()))
        assert isinstance(made, pl.Series)
        return made.cast(pl.List(values.dtype))
