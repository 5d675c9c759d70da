"""Columns of any type that holds a label, numbers, ids or weights reach the batch with their values."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.dataset import MANIFEST_NAME, DatasetManifest, Feature, Part
from data.loader import DataLoader, LoaderConfig

ROWS = 9
LABELS = [pa.bool_(), pa.int8(), pa.uint8(), pa.int64(), pa.float32(), pa.float64()]
NUMBERS = [pa.float32(), pa.float64(), pa.int16(), pa.float16()]
IDS = [pa.int32(), pa.int64(), pa.uint32(), pa.uint8(), pa.dictionary(pa.int32(), pa.int64())]
LISTS = [pa.list_, pa.large_list]


def write(folder: Path, table: pa.Table, manifest: DatasetManifest) -> None:
    """Make a data set of one file with a row group for each four rows."""
    pq.write_table(table, folder / "of others.parquet", row_group_size=4)
    content = (folder / "of others.parquet").read_bytes()
    sizes = [min(4, table.num_rows - begin) for begin in range(0, table.num_rows, 4)]
    part = Part(
        path="of others.parquet",
        day=0,
        num_rows=table.num_rows,
        row_groups=tuple(sizes),
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    made = DatasetManifest(
        features=manifest.features, parts=(part,), dense=manifest.dense, label=manifest.label
    )
    (folder / MANIFEST_NAME).write_text(made.to_json())


def read(folder: Path) -> list:
    config = LoaderConfig(batch_size=2, shuffle=False, window_batches=2, drop_last=False)
    return list(DataLoader(str(folder), config))


@st.composite
def columns(draw):
    """A manifest, an Arrow table of various types that fits it, and the rows in it."""
    features = [
        Feature(name=f"a feature.{number}", rows=ROWS, weights=draw(st.sampled_from(["", f"w.{number}"])))
        for number in range(draw(st.integers(0, 3)))
    ]
    dense = [f"dense {number}" for number in range(draw(st.integers(0 if features else 1, 3)))]
    count = draw(st.integers(2, 11))
    halves = st.lists(st.integers(-8, 8).map(float), min_size=count, max_size=count)
    rows = {"clicked?": draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))}
    table = {"clicked?": pa.array(rows["clicked?"]).cast(draw(st.sampled_from(LABELS)))}
    for name in dense:
        rows[name] = draw(halves)
        table[name] = pa.array(rows[name], pa.float32()).cast(draw(st.sampled_from(NUMBERS)))
    for feature in features:
        is_list = draw(st.booleans())
        sizes = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count)) if is_list else [1] * count
        rows[feature.name] = [draw(st.lists(st.integers(0, ROWS - 1), min_size=n, max_size=n)) for n in sizes]
        make = draw(st.sampled_from(LISTS)) if is_list else None
        of_ids = IDS[:-1] if is_list else IDS
        table[feature.name] = _array(rows[feature.name], draw(st.sampled_from(of_ids)), make)
        if feature.weights:
            rows[feature.weights] = [[draw(st.integers(-4, 4)) / 2 for _ in range(n)] for n in sizes]
            kind = draw(st.sampled_from([pa.float32(), pa.float64()]))
            table[feature.weights] = _array(rows[feature.weights], kind, make)
    manifest = DatasetManifest(features=tuple(features), parts=(), dense=tuple(dense), label="clicked?")
    return manifest, pa.table(table), rows


def _array(bags, kind, make_list):
    if make_list is not None:
        return pa.array(bags, make_list(kind))
    values = pa.array([value for (value,) in bags])
    return values.cast(pa.int64()).dictionary_encode() if pa.types.is_dictionary(kind) else values.cast(kind)


@given(columns())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_batches_have_the_values_of_columns_of_any_type(tmp_path, drawn):
    manifest, table, rows = drawn
    write(tmp_path, table, manifest)
    is_weighted, begin = any(feature.weights for feature in manifest.features), 0
    for batch in read(tmp_path):
        window = slice(begin, begin + batch.num_valid)
        begin += batch.num_valid
        assert batch.dense.shape == (2, len(manifest.dense))
        assert batch.labels.tolist()[: batch.num_valid] == rows["clicked?"][window]
        for index, name in enumerate(manifest.dense):
            assert batch.dense[: batch.num_valid, index].tolist() == rows[name][window]
        weights = batch.sparse.weights_or_none()
        assert (weights is not None) == is_weighted
        for feature in manifest.features:
            own = batch.sparse[feature.name]
            assert [bag.tolist() for bag in own.to_dense()][: batch.num_valid] == rows[feature.name][window]
            if weights is not None:
                assert weights.dtype == torch.float32
                assert weights.numel() == batch.sparse.values().numel()
                ones = [[1.0] * len(bag) for bag in rows[feature.name]]
                found = [bag.tolist() for bag in own.to_dense_weights()]
                assert found[: batch.num_valid] == rows.get(feature.weights, ones)[window]
    assert begin == table.num_rows


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([[0.5], [1.0, 2.0]], "column w has 2 weights, but f has 1 ids; .*row 1 of"),
        ([[0.5], [float("inf")]], "column w holds inf, which is not finite .*row 1 of"),
        ([["1"], ["2"]], "column w should be float32, or lists of it, but is list<.*string>"),
        ([[0.5], [None]], "column w has missing values"),
    ],
)
def test_wrong_weights_are_refused_by_name(tmp_path, weights, message):
    table = pa.table({"label": [0, 1], "f": pa.array([[1], [2]], pa.list_(pa.int32())), "w": weights})
    write(
        tmp_path,
        table,
        DatasetManifest(features=(Feature(name="f", rows=3, weights="w"),), parts=(), dense=()),
    )
    with pytest.raises(ValueError, match=message):
        read(tmp_path)


def test_lists_of_fixed_size_are_lists(tmp_path):
    values = pa.array(np.arange(8) % 5, pa.int64())
    table = pa.table({"label": [0, 1, 1, 0], "f": pa.FixedSizeListArray.from_arrays(values, 2)})
    write(tmp_path, table, DatasetManifest(features=(Feature(name="f", rows=5),), parts=(), dense=()))
    assert [batch.sparse.values().tolist() for batch in read(tmp_path)] == [[0, 1, 2, 3], [4, 0, 1, 2]]
