"""Reads the columns that a schema names from a table of raw rows, and says which rows are bad.

What is read here is not yet ids: values of features are texts or integers, as a vocabulary counts them.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import polars as pl

from data.schema import values
from data.schema.definition import Dense, Schema, Sparse
from data.schema.lists import Ragged
from data.schema.values import Mask

TIME: Final = "__time"
"""Column of a row's time (Int64: microseconds, or a day)."""
DAY: Final = "__day"
"""Column of a row's day (Int64), where a column of the input says it."""

_READERS: Final[dict[str, values.Reader]] = {
    "string": values.texts,
    "integer": values.integers,
    "hex": values.hex_numbers,
}
_WANTED: Final = {"string": "no text", "integer": "no integer", "hex": "no 32-bit hexadecimal number"}


@dataclass(frozen=True)
class Rows:
    """Rows of a table as the schema reads them.

    Attributes:
        frame: a column for the label (UInt8), each dense value (Float32, not yet standardized), each feature
            (String or Int64, or a list; null is missing, and lists have no nulls), its weights
            (List(Float32)), and `TIME` and `DAY`. Bad rows are among them, with any values.
        reasons: reason by row, for bad rows; the first one found.
    """

    frame: pl.DataFrame
    reasons: dict[int, str]

    @property
    def good(self) -> pl.DataFrame:
        """The rows that are not bad."""
        if not self.reasons:
            return self.frame
        mask = np.ones(self.frame.height, bool)
        mask[list(self.reasons)] = False
        return self.frame.filter(pl.Series(mask))


def read_rows(frame: pl.DataFrame, schema: Schema, *, to_train: bool) -> Rows:
    """Read raw rows.

    Args:
        frame: columns of any type, of which those of the schema are read.
        schema: says how.
        to_train: read label, time and split too.

    Raises:
        ValueError: a column is missing, or has a type that the schema cannot mean.
    """
    wanted = schema.columns if to_train else schema.inputs
    absent = [name for name in wanted if name not in frame.columns]
    if absent:
        raise ValueError(
            f"there is no column {absent[0]!r}; the columns are {', '.join(map(repr, frame.columns))}"
        )
    reader = _Reader(frame, schema)
    if to_train:
        reader.read_keys()
    for dense in schema.dense:
        reader.read_dense(dense)
    for sparse in schema.sparse:
        reader.read_sparse(sparse)
    return Rows(pl.DataFrame(reader.made), reader.reasons)


class _Reader:
    def __init__(self, frame: pl.DataFrame, schema: Schema) -> None:
        self._frame, self._schema = frame, schema
        self.made: list[pl.Series] = []
        self.reasons: dict[int, str] = {}

    def read_keys(self) -> None:
        """Read label, time and day, as far as the schema has them."""
        schema = self._schema
        if schema.has_labels:
            found, bad = values.labels(self._column(schema.label.column), schema.label.at_least)
            wanted = "is no number" if schema.label.at_least is not None else "is not 0 or 1"
            self._add(schema.label.name, found, bad, f"{schema.label.column} {wanted}")
        if schema.time is not None:
            found, bad = values.times(self._column(schema.time.column), schema.time)
            self._add(TIME, found, bad, f"{schema.time.column} is no time")
        if schema.split.column:
            found, _ = values.texts(self._column(schema.split.column))
            days = found.replace_strict(dict(schema.split.days), default=None, return_dtype=pl.Int64)
            reason = f"{schema.split.column} is not among the days of the split"
            self._add(DAY, days, days.is_null().to_numpy(), reason)

    def read_dense(self, dense: Dense) -> None:
        """Read a dense column; see `Dense` for the steps."""
        found, bad = values.numbers(self._column(dense.column))
        found = found.fill_null(dense.fill).clip(dense.clip_min, dense.clip_max).cast(pl.Float32)
        if dense.log1p:
            found = (found.clip(0) + 1).log()  # in float32, as data.prepare does
        bad |= ~found.is_finite().to_numpy()
        self._add(dense.name, found, bad, f"{dense.column} is no number that float32 holds")

    def read_sparse(self, sparse: Sparse) -> None:
        """Read the values of a feature, and their weights."""
        if sparse.is_list:
            self._read_list(sparse)
            return
        found, bad = _READERS[sparse.type](self._column(sparse.column))
        self._add(sparse.name, found, bad, f"{sparse.column} is {_WANTED[sparse.type]}")

    def _read_list(self, sparse: Sparse) -> None:
        # a text that stands for a missing value splits into one missing value, which is left out
        bag = _lists(values.known(self._frame[sparse.column], ()), sparse.separator)
        inside = values.known(bag.values, self._schema.missing)
        found, bad = _READERS[sparse.type](inside.alias(sparse.column))
        there = inside.is_not_null().to_numpy()
        kept = bag.keep(there)
        reason = f"{sparse.column} has a value that is {_WANTED[sparse.type]}"
        self._add(sparse.name, kept.series(found.filter(pl.Series(there))), bag.count(bad) > 0, reason)
        if sparse.weights:
            self._read_weights(sparse, bag, there)

    def _read_weights(self, sparse: Sparse, bag: Ragged, there: Mask) -> None:
        """Read weights of the list `bag`, of whose values those `there` are kept."""
        weights = _lists(self._column(sparse.weights), sparse.separator)
        found, bad = values.numbers(values.known(weights.values, self._schema.missing).alias(sparse.weights))
        found = found.cast(pl.Float32)
        bad |= ~found.is_finite().fill_null(False).to_numpy()
        wrong = (weights.lengths != bag.lengths) & (weights.lengths > 0)
        self._note(weights.count(bad) > 0, f"{sparse.weights} has a weight that is no number")
        self._note(wrong, f"{sparse.weights} has not one weight for each value of {sparse.column}")
        # A missing list of weights means 1; a wrong one is of a bad row, so that any numbers will do.
        aligned = np.ones(len(bag.values), np.float32)
        rows = np.repeat(weights.lengths == bag.lengths, bag.lengths)
        of_rows = np.repeat(weights.lengths == bag.lengths, weights.lengths)
        aligned[rows] = found.fill_null(1.0).to_numpy()[of_rows]
        kept = bag.keep(there)
        self.made.append(kept.series(pl.Series(aligned[there])).alias(sparse.weights_name))

    def _column(self, name: str) -> pl.Series:
        return values.known(self._frame[name], self._schema.missing)

    def _add(self, name: str, found: pl.Series, bad: Mask, reason: str) -> None:
        self.made.append(found.alias(name))
        self._note(bad, reason)

    def _note(self, bad: Mask, reason: str) -> None:
        for row in np.flatnonzero(bad).tolist():
            self.reasons.setdefault(row, reason)


def _lists(series: pl.Series, separator: str) -> Ragged:
    if series.dtype == pl.String and separator:
        series = series.str.split(separator)
    elif isinstance(series.dtype, pl.Array):
        series = series.arr.to_list()
    elif series.dtype == pl.Null:
        series = series.cast(pl.List(pl.String))
    if not isinstance(series.dtype, pl.List):
        raise ValueError(
            f"column {series.name!r} holds {series.dtype}, but the schema takes lists; "
            "give texts a `separator`"
        )
    return Ragged.of(series)
