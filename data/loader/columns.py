"""Columns of decoded rows as NumPy arrays: one value a row, or one list of values a row.

Every operation is one vectorised gather or concatenation that releases the interpreter lock, since
the thread that runs them shares a core with training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.int64]


@dataclass(frozen=True)
class Column:
    """One column of `n` rows.

    Attributes:
        values: `[n]`, or the values of all rows if the column holds lists.
        offsets: None, or integer `[n + 1]`: row i owns `values[offsets[i]:offsets[i + 1]]`.
    """

    values: NDArray[Any]
    offsets: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def slice(self, begin: int, end: int) -> "Column":
        """Rows `begin` to `end`, without a copy."""
        if self.offsets is None:
            return Column(self.values[begin:end])
        return Column(self.values, self.offsets[begin : end + 1])

    def take(self, positions: Positions) -> "Column":
        """The rows at `positions`, in that order."""
        if self.offsets is None:
            return Column(self.values.take(positions))
        starts = self.offsets.take(positions)
        lengths = self.offsets.take(positions + 1) - starts
        offsets = _from_lengths(lengths)
        # Value k of the result is value `k - (where its row begins there) + (where it begins here)`.
        source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Column(self.values.take(source), offsets)

    def lengths(self) -> NDArray[Any]:
        """Values of each row."""
        return np.ones(len(self), np.int64) if self.offsets is None else np.diff(self.offsets)

    def bounds(self, step: int) -> NDArray[Any]:
        """Where every `step`-th row begins in `values`, and where the last one ends."""
        return np.arange(0, len(self) + 1, step) if self.offsets is None else self.offsets[::step]


@dataclass(frozen=True)
class Rows:
    """Checked rows: label, dense and categories in manifest order."""

    label: Column
    dense: tuple[Column, ...]
    ids: tuple[Column, ...]

    def pick(self, positions: Positions) -> "Rows":
        """The rows at ascending `positions`; neighbouring ones are not copied."""
        begin, end = int(positions[0]), int(positions[-1]) + 1

        def pick_column(column: Column) -> Column:
            return column.slice(begin, end) if end - begin == len(positions) else column.take(positions)

        return Rows(
            pick_column(self.label), tuple(map(pick_column, self.dense)), tuple(map(pick_column, self.ids))
        )


def join(pieces: Sequence[Column]) -> Column:
    """One column of all rows of `pieces`; a piece of single values counts as lists of one."""
    if len(pieces) == 1:
        return pieces[0]
    values = np.concatenate([_own_values(piece) for piece in pieces])
    if all(piece.offsets is None for piece in pieces):
        return Column(values)
    return Column(values, _from_lengths(np.concatenate([piece.lengths() for piece in pieces])))


def _own_values(column: Column) -> NDArray[Any]:
    """The values that the rows of a sliced column own."""
    return column.values if column.offsets is None else column.values[column.offsets[0] : column.offsets[-1]]


def _from_lengths(lengths: NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
