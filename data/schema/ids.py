"""The rules by which values become ids of table rows."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import polars as pl
import xxhash
from numpy.typing import NDArray

from data.schema.definition import Sparse

MISSING_ID: Final = 0
UNKNOWN_ID: Final = 1
"""Id of values that a vocabulary does not hold."""
FIRST_VOCABULARY_ID: Final = 2
RAW_MISSING_ID: Final = -1


class Vocabulary:
    """Exact look-up of values.

    The values' hashes are sorted, and what is found there is compared with the value itself.

    Args:
        values: String or Int64, distinct, in the order of their ids.
    """

    def __init__(self, values: pl.Series) -> None:
        self.values = values
        self._seed = 0
        hashes = values.hash(self._seed)
        while hashes.n_unique() < len(values):  # a collision: another seed has none
            self._seed += 1
            hashes = values.hash(self._seed)
        self._order = hashes.arg_sort().to_numpy()
        self._hashes: NDArray[np.uint64] = hashes.gather(self._order).to_numpy()

    @property
    def num_rows(self) -> int:
        """Rows that a table needs."""
        return FIRST_VOCABULARY_ID + len(self.values)

    @property
    def num_bytes(self) -> int:
        """Estimate of the memory that it takes."""
        return int(self.values.estimated_size()) + self._order.nbytes + self._hashes.nbytes

    def ids(self, values: pl.Series) -> NDArray[np.int32]:
        """Ids (int32) of values, of which null is missing."""
        found = np.full(len(values), UNKNOWN_ID, np.int32)
        if len(self.values) and len(values):
            place = np.searchsorted(self._hashes, values.hash(self._seed).to_numpy())
            position = self._order[np.minimum(place, len(self._hashes) - 1)]
            same = (self.values.gather(position) == values).fill_null(False).to_numpy()
            found[same] = position[same] + FIRST_VOCABULARY_ID
        found[values.is_null().to_numpy()] = MISSING_ID
        return found


def to_ids(values: pl.Series, sparse: Sparse, vocabulary: Vocabulary | None) -> pl.Series:
    """Ids of the values of one feature.

    Args:
        values: String or Int64, null if missing.
        sparse: the feature.
        vocabulary: for the rule `vocabulary`.

    Returns:
        Int32; Int64 for the rule `raw`.
    """
    if sparse.ids == "raw":
        return values.fill_null(RAW_MISSING_ID)
    if sparse.ids == "vocabulary":
        assert vocabulary is not None, "checked by Encoder"
        return pl.Series(vocabulary.ids(values))
    rows = sparse.rows
    assert rows is not None, "checked by Schema"
    if sparse.ids == "hash":
        return pl.Series(_hash_ids(values, rows))
    if sparse.ids == "mix":
        mixed = pl.select(mix32(pl.lit(values.cast(pl.UInt32)))).to_series()
        return (mixed % rows).cast(pl.Int32).fill_null(MISSING_ID)
    return (values % rows).cast(pl.Int32).fill_null(MISSING_ID)


def mix32(values: pl.Expr) -> pl.Expr:
    """MurmurHash3's 32-bit finalizer of UInt32 values; polars' products wrap around as it wants."""
    mixed = (values ^ (values // 2**16)) * pl.lit(0x85EBCA6B, pl.UInt32)
    mixed = (mixed ^ (mixed // 2**13)) * pl.lit(0xC2B2AE35, pl.UInt32)
    return mixed ^ (mixed // 2**16)


def _hash_ids(values: pl.Series, rows: int) -> NDArray[np.int32]:
    """1 + XXH64 of the value's text in UTF-8 (seed 0), modulo rows - 1; 0 if missing."""
    distinct = values.unique()
    texts: Sequence[str | None] = distinct.cast(pl.String).to_list()
    ids = [
        MISSING_ID if text is None else 1 + xxhash.xxh64_intdigest(text.encode()) % (rows - 1)
        for text in texts
    ]
    made = values.replace_strict(distinct, pl.Series(ids, dtype=pl.Int32))
    return made.cast(pl.Int32).to_numpy()  # an empty column stays Int64 otherwise
