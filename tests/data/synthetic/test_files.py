import gzip
import io
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from data.criteo import COLUMN_NAMES, KAGGLE_CARDINALITIES
from data.synthetic import ClickSource, SyntheticConfig
from data.synthetic.files import mix, plan_files, write_blocks

TINY = {"rows_per_day": 250, "rows_per_block": 100, "rows_per_file": 200}


def write_blocks_to(path, config, blocks):
    with path.open("wb") as file:
        write_blocks(file, config, blocks)


@pytest.fixture(scope="module")
def blocks():
    source = ClickSource(SyntheticConfig(**TINY))
    return [source.block(0, index) for index in range(3)]


@pytest.fixture(scope="module")
def raw(blocks, tmp_path_factory):
    path = tmp_path_factory.mktemp("raw") / "day_0"
    write_blocks_to(path, SyntheticConfig(format="tsv", **TINY), iter(blocks))
    return path.read_bytes()


def test_raw_lines_hold_the_values_of_the_blocks(blocks, raw):
    lines = raw.decode("ascii").split("\n")
    assert lines.pop() == ""
    fields = [line.split("\t") for line in lines]
    assert {len(line) for line in fields} == {40}
    assert [int(line[0]) for line in fields] == np.concatenate([block.labels for block in blocks]).tolist()
    integers = [[max(int(x), 0) if x else 0 for x in line[1:14]] for line in fields]
    dense = np.array([[math.log(x + 1) for x in line] for line in integers], np.float32)
    np.testing.assert_array_max_ulp(dense, np.concatenate([block.dense for block in blocks]), maxulp=1)
    first = 0
    for column, cardinality in enumerate(KAGGLE_CARDINALITIES):
        ids = np.concatenate([block.bags[column].ids for block in blocks])
        expected = [f"{unmixed:08x}" for unmixed in mix((ids + first).astype(np.uint32)).tolist()]
        assert [line[14 + column] for line in fields] == [
            value if present else "" for value, present in zip(expected, ids > 0, strict=True)
        ]
        first += cardinality


def test_raw_categories_differ_between_columns(raw):
    columns = zip(*(line.split("\t")[14:] for line in raw.decode().splitlines()), strict=True)
    values = [set(column) - {""} for column in columns]
    assert sum(map(len, values)) == len(set.union(*values))


@pytest.mark.parametrize(("compression", "decompress"), [("gz", gzip.decompress), ("zst", None)])
def test_compressed_raw_files_hold_the_same_lines(tmp_path, blocks, raw, compression, decompress):
    path = tmp_path / "file"
    write_blocks_to(path, SyntheticConfig(format="tsv", compression=compression, **TINY), iter(blocks))
    packed = path.read_bytes()
    if decompress is None:
        found = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(packed)).read()
    else:
        found = decompress(packed)
    assert found == raw
    assert len(packed) < len(raw)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, unique=True))
def test_mixing_is_a_bijection(numbers):
    mixed = mix(np.array(numbers, np.uint32)).astype(object)
    for number, value in zip(numbers, mixed, strict=True):
        undone = value ^ (value >> 16)
        undone = undone * pow(0xC2B2AE35, -1, 2**32) % 2**32
        undone ^= (undone >> 13) ^ (undone >> 26)
        undone = undone * pow(0x85EBCA6B, -1, 2**32) % 2**32
        assert undone ^ (undone >> 16) == number


def test_parquet_holds_the_blocks_as_row_groups(tmp_path, blocks):
    path = tmp_path / "file.parquet"
    write_blocks_to(path, SyntheticConfig(**TINY), iter(blocks))
    file = pq.ParquetFile(path)
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [100, 100, 50]
    table = file.read()
    assert table.column_names == list(COLUMN_NAMES)
    assert [field.type for field in table.schema] == [pa.int8()] + [pa.float32()] * 13 + [pa.int32()] * 26
    assert not any(field.nullable for field in table.schema)
    for column in range(13):
        expected = np.concatenate([block.dense[:, column] for block in blocks])
        np.testing.assert_array_equal(table.column(1 + column).to_numpy(), expected)
    for column in range(26):
        expected = np.concatenate([block.bags[column].ids for block in blocks])
        np.testing.assert_array_equal(table.column(14 + column).to_numpy(), expected)


def test_multi_hot_parquet_holds_lists(tmp_path):
    config = SyntheticConfig(multi_hot=True, **TINY)
    block = ClickSource(config).block(0, 0)
    write_blocks_to(tmp_path / "file.parquet", config, iter([block]))
    table = pq.read_table(tmp_path / "file.parquet")
    for column, bag in enumerate(block.bags):
        found = table.column(14 + column).combine_chunks()
        assert found.type.value_type == pa.int32()
        assert found.value_lengths().to_pylist() == bag.lengths.tolist()
        assert found.flatten().to_pylist() == bag.ids.tolist()


def test_files_of_a_day_cover_its_blocks_in_order():
    plans = plan_files(SyntheticConfig(days=2, **TINY))
    assert [(plan.path, plan.day, plan.blocks, plan.block_rows) for plan in plans] == [
        ("day=0/part-00000.parquet", 0, (0, 1), (100, 100)),
        ("day=0/part-00001.parquet", 0, (2,), (50,)),
        ("day=1/part-00000.parquet", 1, (0, 1), (100, 100)),
        ("day=1/part-00001.parquet", 1, (2,), (50,)),
    ]
    raw = plan_files(SyntheticConfig(days=2, format="tsv", compression="gz", **TINY))
    assert [(plan.path, plan.num_rows) for plan in raw] == [("day_0.gz", 250), ("day_1.gz", 250)]
