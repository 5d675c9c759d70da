"""What every format gives: blocks of raw rows with their numbers, and the records that are no rows."""

from dataclasses import dataclass, field

import numpy as np
import polars as pl
from numpy.typing import NDArray


@dataclass(frozen=True)
class BadRow:
    """A row or record that is refused."""

    row: int
    """Number in its file, counting from 1, without the header."""
    reason: str
    """Why; equal reasons are counted together."""
    text: str
    """The record, or its columns as JSON."""


@dataclass(frozen=True)
class Block:
    """Consecutive records of a file."""

    frame: pl.DataFrame
    """Columns that the schema reads, of the records that are rows."""
    rows: NDArray[np.int64]
    """Numbers of the rows of `frame`, ascending."""
    num_records: int
    """All records, also those that are no rows."""
    stored_position: int
    """Bytes of the file, as stored, that are read by now."""
    bad: list[BadRow] = field(default_factory=list)
    """Records that are no rows."""


def numbered(first: int, height: int, bad: list[BadRow]) -> NDArray[np.int64]:
    """Numbers of `height` rows from `first` on, among which are also bad ones."""
    numbers = np.arange(first, first + height + len(bad))
    return np.delete(numbers, [one.row - first for one in bad])
