"""Converts parsed columns to the inputs of a model: dense values and table rows.

Dense: float32(log(x + 1)) in float32, a missing integer counts as 0 and a negative one as 0. That
is facebookresearch/dlrm's rule (data_utils.py: `X_int[X_int < 0] = 0`, `np.log(X_int + 1)`);
TorchRec's scripts take log(x + 3) instead, so that Kaggle's int_1, which goes down to -3, stays
apart from 0. A missing category gets id 0, which only the vocabulary keeps for it alone; among raw ids it
is -1, which no value is.
"""

import secrets
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import polars as pl

from data.criteo import CATEGORY_NAMES, DENSE_NAMES, LABEL
from data.jobs.location import Location
from data.schema.ids import MISSING_ID, RAW_MISSING_ID, UNKNOWN_ID, mix32

_DENSE: Final = (pl.col(DENSE_NAMES).cast(pl.Float32).fill_null(0).clip(0) + 1).log()


class IdRule(Protocol):
    """How raw category values become rows of tables. Picklable: worker processes get one."""

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        """The frame with its category columns (UInt32, null if missing) turned into ids (Int32, or Int64)."""


class ArithmeticIds:
    """Ids that follow from the value alone: an expression for each category."""

    def __init__(self, ids: Sequence[pl.Expr]) -> None:
        self._ids = list(ids)

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        """See `IdRule`."""
        return frame.with_columns(self._ids)


def modulo_ids(table_rows: Sequence[int]) -> ArithmeticIds:
    """The raw 32-bit value modulo the table's rows; a missing value counts as 0.

    Values collide as described in `data.prepare.tables`. facebookresearch/dlrm has fewer collisions: its
    `--max-ind-range` is one modulus for all tables, and it then numbers the remainders of each table
    (data_utils.py), which needs a second pass over the input.
    """
    return _remainders(map(pl.col, CATEGORY_NAMES), table_rows)


def hash_ids(table_rows: Sequence[int]) -> ArithmeticIds:
    """The value mixed, then modulo the table's rows: rows are used evenly even where raw values are not.

    The mixing is the finalizer of MurmurHash3 x86_32 (Appleby, public domain), a bijection of 32-bit
    values that keeps 0; so a missing value, which counts as 0, gets id 0.
    """
    return _remainders((mix32(pl.col(name)) for name in CATEGORY_NAMES), table_rows)


def raw_ids() -> ArithmeticIds:
    """The raw value as it is, for dynamic tables."""
    return ArithmeticIds([pl.col(CATEGORY_NAMES).cast(pl.Int64).fill_null(RAW_MISSING_ID)])


def _remainders(values: Iterable[pl.Expr], table_rows: Sequence[int]) -> ArithmeticIds:
    pairs = zip(values, table_rows, strict=True)
    return ArithmeticIds([(value % rows).cast(pl.Int32).fill_null(MISSING_ID) for value, rows in pairs])


class VocabularyIds:
    """Dense ids of the values that occur often enough; 0 is missing, 1 is rare.

    Args:
        files: one a category, as `data.prepare.vocabulary` writes them. They are mapped, not read: the
            kernel shares their pages between processes and drops them when memory is needed.
    """

    def __init__(self, files: Sequence[Location]) -> None:
        self._files = tuple(files)
        self._job = secrets.token_hex(8)  # in another job, files of these names may hold something else

    def encode(self, frame: pl.DataFrame) -> pl.DataFrame:
        """See `IdRule`."""
        tables = _mapped(self._files, self._job)
        return frame.with_columns(
            pl.Series(name, _look_up(frame[name], table), dtype=pl.Int32)
            for name, table in zip(CATEGORY_NAMES, tables, strict=True)
        )


def to_samples(frame: pl.DataFrame, rule: IdRule) -> pl.DataFrame:
    """What the model reads: label UInt8, int_* Float32, cat_* Int32 (raw: Int64), from `read_block`'s."""
    return rule.encode(frame.with_columns(_DENSE)).select(LABEL, *DENSE_NAMES, *CATEGORY_NAMES)


@lru_cache(maxsize=1)
def _mapped(files: Sequence[Location], _job: str) -> list[npt.NDArray[np.uint32]]:
    """The vocabularies of a job, once a process; those on a store as temporary files on the local disk."""
    return [_map(file) for file in files]


def _map(file: Location) -> npt.NDArray[np.uint32]:
    with file.on_disk() as path:
        mapped: npt.NDArray[np.uint32] = np.load(path, mmap_mode="r")
    return mapped  # a copy that is removed stays as long as it is mapped


def _look_up(column: pl.Series, table: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    values, ids = table
    wanted = column.fill_null(0).to_numpy()
    found = np.full(len(wanted), UNKNOWN_ID, np.int32)
    if len(values):
        order = np.argsort(wanted)  # neighbours then search the same pages
        wanted = wanted[order]
        position = np.minimum(np.searchsorted(values, wanted), len(values) - 1)
        found[order] = np.where(values[position] == wanted, ids[position].astype(np.int32), UNKNOWN_ID)
    found[column.is_null().to_numpy()] = MISSING_ID
    return found
