"""Messages of every kind become rows, or bad records with a reason."""

import json
import math
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.criteo import CATEGORY_NAMES, COLUMN_NAMES, PREPARE
from data.dataset import DatasetManifest, Feature
from data.loader.decode import decode
from data.schema import Dense, Label, Schema, Sparse
from data.stream.folder import FolderStream
from data.stream.messages import NO_VALUE, MessageReader
from data.stream.source import START, Place
from tests.data.convert.conftest import job as job  # noqa: PLC0414  # a fixture
from tests.data.convert.conftest import write_jsonl
from tests.data.prepare.conftest import make_lines

ENCODED = DatasetManifest(
    features=(Feature(name="item", rows=100), Feature(name="tags", rows=10, weights="shares")),
    parts=(),
    dense=("price",),
)
GOOD = {"label": 1, "price": 2, "item": 5, "tags": [1, 2], "shares": [0.5, 1]}


def read(reader: MessageReader, values: list, first: int = 0):
    raw = [
        value if value is None or isinstance(value, bytes) else json.dumps(value).encode() for value in values
    ]
    return reader.read(raw, np.arange(first, first + len(values)))


def columns_of(rows) -> list[list]:
    columns = [rows.label, *rows.dense, *rows.ids, *(each for each in rows.weights if each is not None)]
    return [
        [column.take(np.array([row])).values.tolist() for row in range(len(column))] for column in columns
    ]


IDS = st.one_of(st.integers(-1, 10), st.lists(st.integers(-1, 10), max_size=3))
SHARES = st.one_of(st.floats(0, 1), st.lists(st.sampled_from([0.5, 1.0, math.inf]), max_size=3))
MESSAGES = st.fixed_dictionaries(
    {
        "label": st.sampled_from([0, 1, 1, 2]),
        "price": st.sampled_from([0.5, 2, None]),
        "item": IDS,
        "tags": IDS,
        "shares": SHARES,
    }
)


@given(messages=st.lists(MESSAGES, min_size=1, max_size=20))
def test_what_becomes_of_a_message_does_not_depend_on_the_others(messages):
    reader = MessageReader("nowhere", ENCODED, "topic t", is_encoded=True)
    checked = read(reader, messages)
    alone = [read(reader, [message]) for message in messages]
    assert checked.bad == {at: each.bad[0] for at, each in enumerate(alone) if each.bad}
    found = [columns_of(each.rows) for each in alone if each.rows is not None]
    expected = [[row for columns in rows for row in columns] for rows in zip(*found, strict=True)]
    assert (columns_of(checked.rows) if checked.rows is not None else []) == expected


def test_encoded_objects_become_rows_and_may_mix_lists_with_single_values():
    reader = MessageReader("nowhere", ENCODED, "topic t", is_encoded=True)
    single = {**GOOD, "label": False, "price": 0.25, "tags": 3, "shares": 2, "more": "is left alone"}
    checked = read(reader, [GOOD, single, {**GOOD, "tags": [], "shares": []}], first=70)
    assert checked.bad == {}
    assert checked.records.tolist() == [70, 71, 72]
    assert columns_of(checked.rows) == [
        [[1], [0], [1]],
        [[2], [0.25], [2]],
        [[5], [5], [5]],
        [[1, 2], [3], []],
        [[0.5, 1], [2], []],
    ]


def test_lists_may_all_be_empty():
    checked = read(
        MessageReader("nowhere", ENCODED, "t", is_encoded=True), [{**GOOD, "tags": [], "shares": []}]
    )
    assert checked.bad == {}
    assert columns_of(checked.rows)[3:] == [[[]], [[]]]


def test_single_ids_stay_single():
    manifest = DatasetManifest(features=ENCODED.features[:1], parts=(), dense=())
    rows = read(MessageReader("nowhere", manifest, "t", is_encoded=True), [GOOD, GOOD]).rows
    assert rows.ids[0].offsets is None


BAD = [
    (None, NO_VALUE),
    (b"", NO_VALUE),
    (b" \n", NO_VALUE),
    (b"{", "no JSON"),
    (b"\xff", "no JSON"),
    (b"[" * 100_000, "no JSON"),
    ([GOOD], "no JSON object"),
    ({**GOOD, "label": 2}, "a label is 0 or 1"),
    ({**GOOD, "label": "1"}, "label holds no number"),
    ({key: value for key, value in GOOD.items() if key != "price"}, "price holds no number"),
    ({**GOOD, "price": None}, "price holds no number"),
    ({**GOOD, "price": True}, "price holds no number"),
    ({**GOOD, "price": 10**400}, "price holds no number"),
    ({**GOOD, "price": 1e300}, "not finite in float32"),
    (json.dumps({**GOOD, "price": float("nan")}).encode(), "not finite"),
    ({**GOOD, "item": 1.5}, "item holds no integer of 64 bits"),
    ({**GOOD, "item": True}, "item holds no integer"),
    ({**GOOD, "item": 2**63}, "item holds no integer"),
    ({**GOOD, "item": 100}, "ids go from 0 to 99"),
    ({**GOOD, "tags": [1, None]}, "tags holds no integer"),
    ({**GOOD, "shares": [1]}, "1 weights"),
    ({**GOOD, "shares": [1, "x"]}, "shares holds no number"),
]


def test_every_wrong_message_is_a_bad_record_of_its_own_among_good_ones():
    values = [value for wrong, _ in BAD for value in (wrong, GOOD)]
    checked = read(MessageReader("nowhere", ENCODED, "topic t", is_encoded=True), values)
    assert checked.records.tolist() == list(range(1, 2 * len(BAD), 2))
    assert len(checked.rows.label) == len(BAD)
    assert sorted(checked.bad) == list(range(0, 2 * len(BAD), 2))
    for at, (_, reason) in enumerate(BAD):
        assert reason in checked.bad[2 * at], at


def test_a_message_alone_may_be_bad():
    for value, reason in BAD:
        checked = read(MessageReader("nowhere", ENCODED, "topic t", is_encoded=True), [value])
        assert checked.rows is None
        assert len(checked.records) == 0
        assert reason in checked.bad[0]


def rows_of_dataset(folder: Path, manifest: DatasetManifest):
    paths = [folder / part.path for part in manifest.parts]
    table = pa.concat_tables(pq.read_table(path, columns=list(manifest.columns)) for path in paths)
    return decode(table, manifest, "the data set")


def test_raw_objects_become_the_rows_that_data_convert_makes_of_them(tmp_path, job):
    schema = Schema(
        label=Label(column="stars", at_least=4),
        dense=(Dense(column="price", log1p=True),),
        sparse=(
            Sparse(column="city", min_count=1),
            Sparse(column="tags", list=True, type="integer", ids="hash", rows=50, weights="shares"),
            Sparse(column="words", separator="|", min_count=1),
        ),
    )
    cities = ["Zürich", "Bern", None, "a\nb"]
    rows = [
        {
            "stars": number % 6,
            "price": number / 4,
            "city": cities[number % 4],
            "tags": list(range(number % 3)),
            "shares": [0.5] * (number % 3),
            "words": "x|y" if number % 2 else "z",
        }
        for number in range(40)
    ]
    manifest = job(schema, [write_jsonl(tmp_path / "rows.jsonl", rows)], tmp_path / "out")
    reader = MessageReader(str(tmp_path / "out"), manifest, "topic t", is_encoded=False)
    spread = json.dumps(rows[3], indent=1).encode()  # on several lines
    bad = [None, b"{", {**rows[0], "stars": "many"}, {**rows[0], "tags": [1, "x"]}, {**rows[0], "tags": "1"}]
    checked = read(reader, [*rows[:3], spread, *bad, *rows[4:]])
    assert sorted(checked.bad) == [4, 5, 6, 7, 8]
    assert [checked.bad[4], checked.bad[5], checked.bad[6]] == [NO_VALUE, "no JSON", "stars is no number"]
    assert "tags has a value that is no integer" in checked.bad[7]
    assert "no list" in checked.bad[8]
    assert checked.records.tolist() == [*range(4), *range(9, 45)]
    assert columns_of(checked.rows) == columns_of(rows_of_dataset(tmp_path / "out", manifest))


CRITEO = DatasetManifest(
    features=tuple(Feature(name=name, rows=97) for name in CATEGORY_NAMES),
    parts=(),
    provenance={"maker": PREPARE, "identity": {"ids": "modulo"}},
)


@pytest.fixture
def dataset(tmp_path) -> str:
    """URI of a data set that data.prepare has made."""
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "dataset.json").write_text(CRITEO.to_json())
    return str(folder)


@pytest.fixture
def criteo(dataset) -> MessageReader:
    return MessageReader(dataset, CRITEO, "topic t", is_encoded=False)


def criteo_row(line: bytes) -> list[list]:
    label, *fields = line.decode().split("\t")
    dense = [math.log(max(int(field or 0), 0) + 1) for field in fields[:13]]
    return [int(label), *dense, *(int(field or "0", 16) % 97 for field in fields[13:])]


def test_lines_of_criteo_and_objects_of_their_columns_mix(criteo):
    lines = make_lines(60)
    values = [
        {name: field or None for name, field in zip(COLUMN_NAMES, line.decode().split("\t"), strict=True)}
        if number % 3 == 0
        else line + (b"\r\n" if number % 3 == 1 else b"")
        for number, line in enumerate(lines)
    ]
    bad = [b"1\t2", lines[0] + b"\n" + lines[1], b"{}", None]
    checked = read(criteo, [*bad, *values], first=100)
    assert sorted(checked.bad) == [100, 101, 102, 103]
    assert checked.records.tolist() == list(range(104, 164))
    found = np.squeeze(np.array(columns_of(checked.rows)), 2).T
    np.testing.assert_allclose(found, [criteo_row(line) for line in lines], rtol=1e-6)


def test_messages_of_one_kind_only(criteo):
    assert read(criteo, [b"no line"]).rows is None
    assert len(read(criteo, make_lines(3)).rows.label) == 3
    assert read(criteo, [b"{"]).bad == {0: "no JSON"}


def test_a_log_of_criteo_in_a_folder_gives_the_same_rows(tmp_path, dataset, criteo, monkeypatch):
    monkeypatch.setattr("data.stream.files.BLOCK_BYTES", 1000)
    lines = [*make_lines(30), b"1\t2", *make_lines(30, seed=1)]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "day_0").write_bytes(b"".join(line + b"\n" for line in lines))
    stream = FolderStream(
        str(tmp_path / "in"), CRITEO, dataset, is_encoded=False, now=lambda: time.time() + 100
    )
    expected = read(criteo, lines)
    assert expected.bad.keys() == {30}
    for begin in (0, 7, 31):
        places = dict.fromkeys(stream.partitions, START)
        assert stream.fetch(places, 1) is not None  # now it knows the file
        places = {name: stream.skip(name, START, begin)[0] for name in places}
        records, columns, bad = [], [[] for _ in CRITEO.columns], {}
        while (fetched := stream.fetch(places, 10)) is not None:
            places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
            records += fetched.checked.records.tolist()
            bad |= fetched.checked.bad
            for column, more in zip(columns, columns_of(fetched.checked.rows), strict=True):
                column.extend(more)
        assert records == [number for number in range(begin, 61) if number != 30]
        assert bad == {number: reason for number, reason in expected.bad.items() if number >= begin}
        left = np.searchsorted(expected.records, begin)
        assert columns == [own[left:] for own in columns_of(expected.rows)]
