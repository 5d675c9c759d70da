"""Ids from a vocabulary: the `IdRule` of the second pass of `--ids vocabulary`."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl

from data.criteo import CATEGORY_NAMES
from data.prepare.parse.ids import MISSING_ID, RARE_ID


class VocabularyIds:
    """Dense ids of the values that occur often enough; 0 is missing, 1 is rare.

    Args:
        files: one a category, as `data.prepare.vocabulary` writes them. They are mapped, not read: the
            kernel shares their pages between processes and drops them when memory is needed.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._tables: list[npt.NDArray[np.uint32]] | None = None

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        """See `IdRule`."""
        if self._tables is None:  # opened in the worker process, since mapped files cannot be pickled
            self._tables = [np.load(path, mmap_mode="r") for path in self._files]
        return frame.with_columns(
            pl.Series(name, _look_up(frame[name], table), dtype=pl.Int32)
            for name, table in zip(CATEGORY_NAMES, self._tables, strict=True)
        )


def _look_up(column: pl.Series, table: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    values, ids = table
    wanted = column.fill_null(0).to_numpy()
    found = np.full(len(wanted), RARE_ID, np.int32)
    if len(values):
        order = np.argsort(wanted)  # neighbours then search the same pages
        wanted = wanted[order]
        position = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
        found[order] = np.where(values[position] == wanted, ids[position].astype(np.int32), RARE_ID)
    found[column.is_null().to_numpy()] = MISSING_ID
    return found
