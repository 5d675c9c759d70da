"""Dense values and ids against plain Python."""

import math

import numpy as np
import polars as pl

from data.jobs.location import Location
from data.prepare.parse.columns import read_block
from data.prepare.parse.ids import VocabularyIds, hash_ids, modulo_ids, raw_ids, to_samples
from data.schema.ids import mix32
from tests.data.prepare.conftest import make_lines

LINES = make_lines(200, seed=3)
((FRAME, _),) = read_block(b"\n".join(LINES) + b"\n")
FIELDS = [line.split(b"\t") for line in LINES]
ROWS = tuple(range(100, 126))


def murmur3_finalizer(value: int) -> int:
    mask = 0xFFFFFFFF
    value = (value ^ value >> 16) * 0x85EBCA6B & mask
    value = (value ^ value >> 13) * 0xC2B2AE35 & mask
    return value ^ value >> 16


def test_dense_is_log_of_one_more_and_nothing_below_zero():
    samples = to_samples(FRAME, modulo_ids(ROWS))
    for column in range(13):
        expected = [math.log(max(int(fields[1 + column] or b"0"), 0) + 1) for fields in FIELDS]
        np.testing.assert_allclose(samples[f"int_{column}"].to_numpy(), expected, rtol=1e-6)


def test_modulo_and_hash():
    modulo, hashed = to_samples(FRAME, modulo_ids(ROWS)), to_samples(FRAME, hash_ids(ROWS))
    for column, rows in enumerate(ROWS):
        raw = [int(fields[14 + column] or b"0", 16) for fields in FIELDS]
        assert modulo[f"cat_{column}"].to_list() == [value % rows for value in raw]
        assert hashed[f"cat_{column}"].to_list() == [murmur3_finalizer(value) % rows for value in raw]


def test_raw_ids_are_the_values_and_a_missing_one_is_none_of_them():
    samples = to_samples(FRAME, raw_ids())
    assert {samples.schema[f"cat_{i}"] for i in range(26)} == {pl.Int64}
    for column in range(26):
        raw = [int(fields[14 + column], 16) if fields[14 + column] else -1 for fields in FIELDS]
        assert samples[f"cat_{column}"].to_list() == raw
    assert samples["cat_0"].min() == -1


def test_mixing_is_murmur3s_and_keeps_zero():
    # Known answers of fmix32, from the published murmur3 test values.
    values = pl.DataFrame({"value": pl.Series([0, 1, 0xFFFFFFFF], dtype=pl.UInt32)})
    assert values.select(mix32(pl.col("value"))).to_series().to_list() == [0, 0x514E28B7, 0x81F16F39]


def test_vocabulary_ids(tmp_path):
    path = tmp_path / "one.npy"
    np.save(path, np.array([[0, 7, 0xFFFFFFFF], [4, 2, 3]], np.uint32))
    empty = tmp_path / "none.npy"
    np.save(empty, np.zeros((2, 0), np.uint32))
    frame = pl.DataFrame(
        {f"cat_{i}": pl.Series([7, None, 0xFFFFFFFF, 5, 0], dtype=pl.UInt32) for i in range(26)}
    )
    found = VocabularyIds([Location.of(path)] * 25 + [Location.of(empty)]).encode(frame)
    assert found["cat_0"].to_list() == [2, 0, 3, 1, 4]
    assert found["cat_25"].to_list() == [1, 0, 1, 1, 1]
