"""Raw rows to ids and numbers, against plain Python; and against data sets of `data.prepare`."""

import json
import math
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from data.criteo import CATEGORY_NAMES, COLUMN_NAMES, DENSE_NAMES
from data.dataset import Feature, read_manifest
from data.jobs.location import Location
from data.prepare.config import PrepareConfig
from data.prepare.job import prepare
from data.schema import Dense, Encoder, Label, Schema, Sparse, Time
from data.schema.rows import TIME, read_rows
from tests.data.prepare.conftest import make_lines

SCHEMA = Schema(
    label=Label(column="stars", at_least=4),
    dense=(
        Dense(column="price", log1p=True),
        Dense(column="price", name="scaled", fill=1, clip_max=9, standardize=True, mean=2, std=4),
    ),
    sparse=(
        Sparse(column="city"),
        Sparse(column="user", type="integer", ids="hash", rows=50),
        Sparse(column="item", type="integer", ids="raw"),
        Sparse(column="tags", separator="|", weights="shares"),
        Sparse(column="old", type="hex", ids="modulo", rows=7),
    ),
    missing=("", "NA"),
)
VALUES = {"city": pl.Series(["Zürich", "🦊", "a,b"]), "tags": pl.Series(["x", "y z"])}
ENCODER = Encoder(SCHEMA, VALUES)
WORDS = st.sampled_from(["Zürich", "🦊", "a,b", "x", "y z", "elsewhere", "0", "NA", "", None])
NUMBERS = st.none() | st.integers(-(2**40), 2**40) | st.floats(-1e30, 1e30)
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "price": NUMBERS,
            "city": WORDS,
            "user": st.none() | st.integers(-(2**63), 2**63 - 1),
            "item": st.none() | st.integers(-(2**63), 2**63 - 1),
            "tags": st.none() | st.lists(st.tuples(WORDS, st.floats(-10, 10, width=32)), max_size=4),
            "old": st.none() | st.integers(0, 2**32 - 1),
        }
    ),
    max_size=20,
)


def vocabulary_id(value, name):
    if value in (None, "", "NA"):
        return 0
    known = VALUES[name].to_list()
    return 2 + known.index(value) if value in known else 1


def reference(row):
    price = row["price"]
    tags = [(one, weight) for one, weight in row["tags"] or [] if one not in (None, "", "NA")]
    return {
        "price": math.log1p(max(price or 0, 0)),
        "scaled": (min(1 if price is None else price, 9) - 2) / 4,
        "city": vocabulary_id(row["city"], "city"),
        "user": 0 if row["user"] is None else 1 + xxhash.xxh64_intdigest(str(row["user"]).encode()) % 49,
        "item": -1 if row["item"] is None else row["item"],
        "tags": [vocabulary_id(one, "tags") for one, _ in tags],
        "old": (row["old"] or 0) % 7,
        "tags_weights": [weight for _, weight in tags],
    }


def text(value):
    return "" if value is None else str(value)


def typed_frame(rows):
    kinds = {
        "price": pl.Float64,
        "city": pl.Categorical,
        "user": pl.Int64,
        "item": pl.Int64,
        "tags": pl.List(pl.String),
        "shares": pl.List(pl.Float64),
        "old": pl.UInt32,
    }
    columns = {name: [row.get(name) for row in rows] for name in kinds}
    columns["tags"] = [None if row["tags"] is None else [one for one, _ in row["tags"]] for row in rows]
    columns["shares"] = [
        None if row["tags"] is None else [weight for _, weight in row["tags"]] for row in rows
    ]
    columns["price"] = [None if row["price"] is None else float(row["price"]) for row in rows]
    return pl.DataFrame([pl.Series(name, columns[name], dtype=kind) for name, kind in kinds.items()])


def text_frame(rows):
    """What a CSV file holds; a list of one missing value is there an empty list."""
    columns = {name: [text(row[name]) for row in rows] for name in ("price", "city", "user", "item")}
    columns["old"] = ["" if row["old"] is None else f"{row['old']:x}" for row in rows]
    columns["tags"] = ["|".join(text(one) for one, _ in row["tags"] or []) for row in rows]
    columns["shares"] = ["|".join(text(weight) for _, weight in row["tags"] or []) for row in rows]
    return pl.DataFrame(columns, schema=dict.fromkeys(columns, pl.String))


@given(ROWS)
def test_encoding_is_what_python_computes_from_typed_columns_and_from_texts(rows):
    expected = [reference(row) for row in rows]
    for frame in (typed_frame(rows), text_frame(rows)):
        made = ENCODER.encode(frame.lazy())
        assert made.columns == list(ENCODER.columns) == list(reference(ROW))
        assert dict(made.schema) == {
            **dict.fromkeys(["price", "scaled"], pl.Float32),
            **dict.fromkeys(["city", "user", "old"], pl.Int32),
            "item": pl.Int64,
            "tags": pl.List(pl.Int32),
            "tags_weights": pl.List(pl.Float32),
        }
        for name in ENCODER.columns:
            found, wanted = made[name].to_list(), [row[name] for row in expected]
            if name in ("price", "scaled"):
                np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
            else:
                assert found == wanted


ROW = {"price": 1, "city": None, "user": 1, "item": 2, "tags": None, "old": 3}


def test_state_gives_an_equal_encoder():
    state = json.loads(json.dumps(ENCODER.state()))
    frame = typed_frame([ROW, {**ROW, "city": "🦊", "tags": [("y z", 2.0)]}])
    assert Encoder.from_state(state).encode(frame).equals(ENCODER.encode(frame))
    assert ENCODER.features == (
        Feature(name="city", rows=5),
        Feature(name="user", rows=50),
        Feature(name="item", rows=0),
        Feature(name="tags", rows=4, weights="tags_weights"),
        Feature(name="old", rows=7),
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"price": "ten"}, "price is no number that float32 holds"),
        ({"price": "inf"}, "price is no number"),
        ({"user": "1.5"}, "user is no integer"),
        ({"user": str(2**63)}, "user is no integer"),
        ({"old": "1ffffffff"}, "old is no 32-bit hexadecimal number"),
        ({"tags": "x|y z", "shares": "1"}, "shares has not one weight for each value of tags"),
        ({"tags": "x|y z", "shares": "1|a"}, "shares has a weight that is no number"),
        ({"tags": "x|y z", "shares": "1|"}, "shares has a weight that is no number"),
    ],
)
def test_rows_that_cannot_be_read_are_named(changes, reason):
    frame = text_frame([ROW, ROW, ROW])
    for name, value in changes.items():
        frame[1, name] = value
    with pytest.raises(ValueError, match=rf"1 of 3 rows.*row 1: {reason}"):
        ENCODER.encode(frame)


def test_weights_that_are_missing_are_one():
    frame = text_frame([ROW, ROW]).with_columns(tags=pl.Series(["x||y z", ""]), shares=pl.Series(["", "NA"]))
    made = ENCODER.encode(frame)
    assert made["tags"].to_list() == [[2, 3], []]
    assert made["tags_weights"].to_list() == [[1, 1], []]


def test_wrong_columns_and_types_are_the_users_mistake():
    frame = typed_frame([ROW])
    with pytest.raises(ValueError, match="no column 'city'; the columns are 'price', 'user'"):
        ENCODER.encode(frame.drop("city"))
    with pytest.raises(ValueError, match=r"'city' holds Float64, but.*type = \"integer\""):
        ENCODER.encode(frame.with_columns(city=pl.lit(1.5)))
    with pytest.raises(ValueError, match=r"'city' holds List.*list = true"):
        ENCODER.encode(frame.with_columns(city=frame["tags"]))
    with pytest.raises(ValueError, match="'tags' holds Int64, but the schema takes lists"):
        ENCODER.encode(frame.with_columns(tags=frame["user"]))
    with pytest.raises(ValueError, match="'city' has no vocabulary"):
        Encoder(SCHEMA, {})


@pytest.mark.parametrize(
    ("values", "time", "expected"),
    [
        (
            ["2020-01-01", "2020-01-01 00:00:00.5", "2020-01-01T01:00Z", "2020-01-01T02:00:00+02:00", "x"],
            {},
            0,
        ),
        ([1577836800, 1577836800.5, 1577840400, "1577836800.0", "x"], {"unit": "s"}, 0),
        (["20010100", None, "20010101", "20010100", "200101"], {"format": "%y%m%d%H"}, 0),
    ],
)
def test_times(values, time, expected):
    start = int(datetime(2020, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
    schema = Schema(label=Label(column="l"), sparse=(Sparse(column="f"),), time=Time(column="t", **time))
    texts = [None if value is None else str(value) for value in values]
    rows = read_rows(pl.DataFrame({"l": "1", "f": "v", "t": texts}), schema, to_train=True)
    offsets = [0, 500_000, 3_600_000_000, 0, None]
    found = [None if row in rows.reasons else rows.frame[TIME][row] - start for row in range(5)]
    assert found == ([0, None, 3_600_000_000, 0, None] if None in values else offsets)


def test_labels():
    for values in (
        ["0", "1", "True", "false", "1.0", "2", ""],
        [0, 1, 1, 0, 1, 2, None],
        [0.0, 1, 1, 0, 1, 0.5, None],
    ):
        schema = Schema(label=Label(column="l"), dense=(Dense(column="f"),))
        frame = pl.DataFrame({"l": values, "f": 1})
        rows = read_rows(frame, schema, to_train=True)
        assert rows.good["l"].to_list() == [0, 1, 1, 0, 1]
        assert set(rows.reasons) == {5, 6}
    rows = read_rows(pl.DataFrame({"l": [True, False, None], "f": 1}), schema, to_train=True)
    assert rows.good["l"].to_list() == [1, 0]


@pytest.mark.system
@pytest.mark.parametrize("ids", ["modulo", "hash", "vocabulary", "raw"])
def test_criteo_data_sets_have_an_encoder_that_gives_their_columns(tmp_path, ids):
    lines = make_lines(400, seed=5)
    (tmp_path / "day_0").write_bytes(b"\n".join(lines))
    table_rows = "97" if ids in ("modulo", "hash") else None
    prepare(
        PrepareConfig(
            raw=(Location.of(tmp_path / "day_0"),),
            out=Location.of(tmp_path / "out"),
            ids=ids,
            table_rows=table_rows,
            num_processes=1,
        )
    )
    encoder = Encoder.of_dataset(str(tmp_path / "out"))
    manifest = read_manifest(str(tmp_path / "out"))
    assert encoder.features == manifest.features
    texts = [line.decode().split("\t") for line in lines]
    raw = pl.DataFrame(texts, schema=dict.fromkeys(COLUMN_NAMES, pl.String), orient="row")
    stored = pl.concat(
        [pl.from_arrow(pq.read_table(tmp_path / "out" / part.path)) for part in manifest.parts]
    )
    names = [*DENSE_NAMES, *CATEGORY_NAMES]
    assert encoder.encode(raw).equals(stored.select(names))
    assert Encoder.from_state(encoder.state()).encode(raw).equals(stored.select(names))


def test_a_data_set_of_unknown_origin_has_no_encoder(make_dataset, tmp_path):
    make_dataset(tmp_path / "out")
    with pytest.raises(ValueError, match="does not say how raw rows become ids"):
        Encoder.of_dataset(str(tmp_path / "out"))
