"""Columns of decoded rows as NumPy arrays, with one value or one list of values per row.

Every operation is one vectorised gather or concatenation, which releases the interpreter lock, since the
background thread shares a core with training.
"""

from collections.abc import Callable, Sequence
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
        """View of the rows `begin` to `end`."""
        if self.offsets is None:
            return Column(self.values[begin:end])
        return Column(self.values, self.offsets[begin : end + 1])

    def take(self, positions: Positions) -> "Column":
        """Gather the rows at `positions`, in that order."""
        if self.offsets is None:
            return Column(self.values.take(positions))
        starts = self.offsets.take(positions)
        lengths = self.offsets.take(positions + 1) - starts
        offsets = _from_lengths(lengths)
        # value k of the result is value `k - (start of its row there) + (start of its row here)`
        source = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Column(self.values.take(source), offsets)

    def lengths(self) -> NDArray[Any]:
        """Number of values of each row."""
        return np.ones(len(self), np.int64) if self.offsets is None else np.diff(self.offsets)

    def bounds(self, step: int) -> NDArray[Any]:
        """Start in `values` of every `step`-th row, and end of the last one."""
        return np.arange(0, len(self) + 1, step) if self.offsets is None else self.offsets[::step]


@dataclass(frozen=True)
class Rows:
    """Checked rows: label, dense columns, and ids of all features with their weights, in manifest order.

    `weights` has a column of the shape of the ids for each feature, or None if the feature has no weights.
    """

    label: Column
    dense: tuple[Column, ...]
    ids: tuple[Column, ...]
    weights: tuple[Column | None, ...]

    def pick(self, positions: Positions) -> "Rows":
        """Gather the rows at ascending `positions`; a contiguous range is not copied."""
        begin, end = int(positions[0]), int(positions[-1]) + 1

        is_range = end - begin == len(positions)
        return self._of_each(lambda column: column.slice(begin, end) if is_range else column.take(positions))

    def take(self, positions: Positions) -> "Rows":
        """Copy the rows at `positions`, in that order."""
        return self._of_each(lambda column: column.take(positions))

    def _of_each(self, change: Callable[[Column], Column]) -> "Rows":
        return Rows(
            label=change(self.label),
            dense=tuple(map(change, self.dense)),
            ids=tuple(map(change, self.ids)),
            weights=tuple(None if column is None else change(column) for column in self.weights),
        )


def join(pieces: Sequence[Column]) -> Column:
    """Concatenate columns; single values count as lists of one if another piece holds lists."""
    if len(pieces) == 1:
        return pieces[0]
    values = np.concatenate([_own_values(piece) for piece in pieces])
    if all(piece.offsets is None for piece in pieces):
        return Column(values)
    return Column(values, _from_lengths(np.concatenate([piece.lengths() for piece in pieces])))


def _own_values(column: Column) -> NDArray[Any]:
    """Values of the rows of a column that may be sliced."""
    return column.values if column.offsets is None else column.values[column.offsets[0] : column.offsets[-1]]


def _from_lengths(lengths: NDArray[Any]) -> NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
