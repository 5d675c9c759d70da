"""Whole conversions against plain Python, equal bytes for all formats and block sizes, and clear errors."""

import gzip
import json
import math
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data.dataset import read_manifest
from data.jobs.location import Location
from data.jobs.verify import verify
from data.schema import Dense, Encoder, Label, Schema, Sparse, Split, Time
from tests.data.convert.conftest import digests, write_csv, write_jsonl, write_parquet

WORDS = st.sampled_from(["a", "b", "c,d", "Zürich", 'q"uote', "new\nline", " x ", "🦊", "", None])
ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "stars": st.integers(1, 5),
            "price": st.none() | st.floats(-1e6, 1e6, allow_subnormal=False),
            "shop.name": WORDS,
            "item": st.none() | st.integers(-(2**63), 2**63 - 1),
            "tags": st.lists(WORDS.filter(lambda word: word is None or "|" not in word), max_size=3),
            "when": st.integers(0, 6 * 86_400),
            "fold": st.sampled_from(["train", "test"]),
        }
    ),
    min_size=3,
    max_size=40,
)
SPLITS = {
    "days": (Time(column="when", unit="s"), Split()),
    "day numbers": (Time(column="when", unit="day"), Split()),
    "parts by time": (Time(column="when", unit="ms"), Split(parts=3)),
    "parts by position": (None, Split(parts=2)),
    "test": (Time(column="when", unit="us"), Split(test=0.25)),
    "column": (Time(column="when", unit="s"), Split(column="fold", days={"train": 0, "test": 7})),
    "nothing": (None, Split()),
}


def schema_of(split, min_count, max_rows=None):
    time, how = SPLITS[split]
    return Schema(
        label=Label(column="stars", at_least=4),
        dense=(
            Dense(column="price", standardize=True),
            Dense(column="price", name="log", log1p=True, clip_max=1000),
        ),
        sparse=(
            Sparse(column="shop.name", name="shop", min_count=min_count, max_rows=max_rows),
            Sparse(column="item", type="integer", ids="raw"),
            Sparse(column="tags", separator="|", min_count=min_count),
        ),
        time=time,
        split=how,
    )


def vocabulary(values, min_count, max_rows=None):
    counts = Counter(value for value in values if value)
    frequent = [value for value in counts if counts[value] >= min_count]
    ordered = sorted(frequent, key=lambda value: (-counts[value], value))
    return {value: 2 + at for at, value in enumerate(ordered[: (max_rows or 10**6) - 2])}


def expected_days(rows, split, min_count, max_rows):
    """Rows by day, as plain Python has them."""
    shops = vocabulary([row["shop.name"] for row in rows], min_count, max_rows)
    tags = vocabulary([tag for row in rows for tag in row["tags"]], min_count)
    prices = np.array([np.float32(row["price"] or 0) for row in rows], np.float64)
    std = prices.std() or 1.0
    time, how = SPLITS[split]
    ordered = sorted(rows, key=lambda row: row["when"]) if time else rows
    first, total = min(row["when"] for row in rows) // 86_400, len(rows)
    days = {}
    for at, row in enumerate(ordered):
        if how.column:
            day = how.days[row["fold"]]
        elif split == "days":
            day = row["when"] // 86_400 - first
        elif split == "day numbers":
            day = row["when"]
        else:
            ends = [round(total * 0.75), total] if how.test else []
            parts = how.parts or 7
            ends = ends or [total * (part + 1) // parts for part in range(parts)]
            day = next(part for part, end in enumerate(ends) if at < end)
        days.setdefault(day, []).append(
            {
                "stars": int(row["stars"] >= 4),
                "price": (float(np.float32(row["price"] or 0)) - prices.mean()) / std,
                "log": math.log1p(min(max(row["price"] or 0, 0), 1000)),
                "shop": shops.get(row["shop.name"], 1) if row["shop.name"] else 0,
                "item": -1 if row["item"] is None else row["item"],
                "tags": [tags.get(tag, 1) for tag in row["tags"] if tag],
            }
        )
    return dict(sorted(days.items()))


def read_days(out):
    manifest = read_manifest(str(out))
    parts = [(part.day, pl.read_parquet(out / part.path)) for part in manifest.parts]
    return {day: pl.concat([frame for one, frame in parts if one == day]) for day, _ in parts}


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    rows=ROWS,
    split=st.sampled_from(list(SPLITS)),
    min_count=st.integers(1, 3),
    max_rows=st.none() | st.integers(3, 5),
    block_bytes=st.integers(40, 2000),
)
def test_conversion_is_what_python_computes_in_every_format(
    job, tmp_path_factory, monkeypatch, rows, split, min_count, max_rows, block_bytes
):
    folder = tmp_path_factory.mktemp("case")
    schema = schema_of(split, min_count, max_rows)
    monkeypatch.setattr("data.convert.write.GROUP_ROWS", 4)
    monkeypatch.setattr("data.convert.job.GROUPS_PER_FILE", 2)
    monkeypatch.setattr("data.convert.runs.SLICE_BYTES", 150)
    files = {
        "csv": write_csv(folder / "t.csv", rows),
        "tsv": write_csv(folder / "t.tsv", rows, "\t"),
        "jsonl": write_jsonl(folder / "t.jsonl", rows),
        "parquet": write_parquet(
            folder / "t.parquet", rows, price=pl.Float64, item=pl.Int64, tags=pl.List(pl.String)
        ),
    }
    for kind, path in files.items():
        job(schema, [path], folder / kind, block_bytes, max_bad_ratio=0)
    found, expected = read_days(folder / "csv"), expected_days(rows, split, min_count, max_rows)
    assert list(found) == list(expected)
    for day, frame in found.items():
        for name in frame.columns:
            values, wanted = frame[name].to_list(), [row[name] for row in expected[day]]
            if name in ("price", "log"):
                np.testing.assert_allclose(values, wanted, rtol=2e-5, atol=2e-5)
            else:
                assert values == wanted, name
    bytes_of = {kind: digests(folder / kind) for kind in files}
    for kind in files:
        del bytes_of[kind]["dataset.json"]  # it names the files of the input
        assert bytes_of[kind] == bytes_of["csv"], kind
        assert verify(Location.of(folder / kind)) == []
    # the encoder of the data set gives its columns for the raw rows
    ordered = sorted(rows, key=lambda row: row["when"]) if SPLITS[split][0] else rows
    if not SPLITS[split][1].column:
        raw = pl.DataFrame(ordered, schema_overrides={"item": pl.Int64, "tags": pl.List(pl.String)})
        encoder = Encoder.of_dataset(str(folder / "csv"))
        assert encoder.encode(raw).equals(pl.concat(found.values()).drop("stars"))
        assert encoder.features == read_manifest(str(folder / "csv")).features


SMALL = Schema(label=Label(column="y"), dense=(Dense(column="x"),), sparse=(Sparse(column="s"),))
GOOD = [{"y": index % 2, "x": index, "s": f"v{index % 5}"} for index in range(50)]


def test_bad_rows_are_counted_by_reason_and_kept_with_file_and_row(job, tmp_path):
    lines = [f"{row['y']},{row['x']},{row['s']}" for row in GOOD]
    lines[3] = "2,1,a"
    lines[5] = "1,x,a"
    lines[7] = "1,1"
    lines[9] = '1,"1"x,a'
    lines[11] = '1,"open,a'
    text = "y,x,s\n" + "\n".join(lines) + "\n1,1e39,a\n"
    (tmp_path / "t.csv").write_bytes(text.encode() + b"0,1,\xff\n\n1,4,last")
    for block_bytes in (30, 10_000):
        out = tmp_path / f"out{block_bytes}"
        with pytest.raises(ValueError, match=r"7 of 53 rows are bad \(2: .*rejects\.jsonl lists them"):
            job(SMALL, [tmp_path / "t.csv"], out, block_bytes)
        assert not (out / "dataset.json").exists()
        manifest = job(SMALL, [tmp_path / "t.csv"], out, block_bytes, max_bad_ratio=0.2)
        assert manifest.num_rows == 46
        rejects = [json.loads(line) for line in (out / "rejects.jsonl").open()]
        assert [(one["file"], one["row"], one["reason"]) for one in rejects] == [
            ("t.csv", 4, "y is not 0 or 1"),
            ("t.csv", 6, "x is no number that float32 holds"),
            ("t.csv", 8, "another number of fields than the header"),
            ("t.csv", 10, "a quote is not closed, or text follows one"),
            ("t.csv", 12, "a quote is not closed, or text follows one"),
            ("t.csv", 51, "x is no number that float32 holds"),
            ("t.csv", 52, "broken UTF-8"),
        ]
        assert rejects[2]["text"] == "1,1"
        assert json.loads(rejects[0]["text"]) == {"y": "2", "x": "1", "s": "a"}
    assert digests(tmp_path / "out30") == digests(tmp_path / "out10000")


def test_bad_lines_of_json(job, tmp_path):
    schema = Schema(
        label=Label(column="y"),
        dense=(Dense(column="x"),),
        sparse=(Sparse(column="s", min_count=1), Sparse(column="l", list=True)),
    )
    nested, pair = (
        "a list or object where a text should be (lists need list = true)",
        "half a surrogate pair, which is no text",
    )
    infinite = "a number that is not finite: NaN, Infinity, or one too large for a float"
    bad = {
        "{": "no JSON",
        "[1]": "no JSON object",
        '{"y": 1, "s": ["u1", "u2"]}': nested,
        '{"y": 1, "s": {}, "s": "b"}': nested,
        '{"y": 1, "l": ["a", ["b"]]}': nested,
        '{"y": [1]}': nested,
        '{"y": 1, "l": {"a": 1}}': "no list where the others have one",
        '{"y": 1, "s": "a\\ud83d"}': pair,
        '{"y": 1, "l": [null, "\\udc00"]}': pair,
        '{"y": 1, "x": 1e999}': infinite,
        '{"y": 1, "x": NaN}': infinite,
        '{"y": 1, "s": "\udcff"}': "broken UTF-8",
    }
    good = [
        '{"y": true, "x": null}',
        '{"y": 1, "s": "[1] {}\\u0000", "l": ["{", null]}',
        '{"y": 1, "s": "\\ud83d\\ude00"}',
    ]
    good += ['{"y": 0, "s": "first", "s": ["last"]}']
    lines = [json.dumps({**row, "l": ["a"]}) for row in GOOD] + good
    for at, line in enumerate(bad):
        lines.insert(2 + 4 * at, line)
    (tmp_path / "t.jsonl").write_text("\n\n".join(lines), errors="surrogateescape")
    for block_bytes in (40, 10_000):
        out = tmp_path / f"out{block_bytes}"
        manifest = job(schema, [tmp_path / "t.jsonl"], out, block_bytes, max_bad_ratio=0.5)
        assert manifest.num_rows == 54
        rejects = [json.loads(line) for line in (out / "rejects.jsonl").open()]
        assert [one["row"] for one in rejects] == list(range(3, 3 + 4 * len(bad), 4))
        assert [one["reason"] for one in rejects] == list(bad.values())
        values = pl.read_parquet(out / "vocabulary" / "s.parquet")["value"]
        assert sorted(values) == sorted(["[1] {}\0", "first", *(f"v{at}" for at in range(5)), "\U0001f600"])
    assert digests(tmp_path / "out40") == digests(tmp_path / "out10000")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "", "t.csv is empty"),
        ("t.csv", "y,x\n1,2\n", "has no column 's'; its columns are 'y', 'x'"),
        ("t.csv", "y\tx\ts\n1\t2\ta\n", r"has no column 'y'.*name it \.tsv"),
        ("t.csv", "y,x,s,s\n1,2,a,b\n", "has 2 columns 's'; rename one"),
        ("t.csv", "y,x,s\n", "not one good row"),
        ("t.csv", "y,x,s\n5,1,a\n6,1,a\n", r"of its first 2 rows 2 are bad, 2 because y is not 0 or 1"),
        ("t.txt", "y,x,s\n1,2,a\n", r"the format is told from the name"),
        ("t.jsonl", "[]\n", "is empty, or not jsonl"),
        ("t.jsonl", '{"y": 1, "x": 2}\n', "has no column 's'"),
        ("t.jsonl", '{"y": 1, "x": 2, "s": ["a"]}\n', "1 because a list or object where a .*list = true"),
        ("t.csv", "y;x;s\n1;2;a\n", r"no comma \(is it .*with commas\); rows without labels"),
        ("t.csv", "y,x,s\n1,2,a\n".encode("utf-16"), r"'\\x00s\\x00'; it is not UTF-8 \(is it UTF-16"),
        ("t.parquet", "y,x,s\n", "is no Parquet file"),
        ("t.csv.gz", "y,x,s\n", "t.csv.gz is empty|no column|not one good row"),
    ],
)
def test_mistakes_in_the_input_are_named_and_leave_no_data_set(job, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        job(SMALL, [tmp_path / name], tmp_path / "out")
    assert not (tmp_path / "out" / "dataset.json").exists()


def test_a_schema_that_does_not_fit_is_corrected_for_the_same_folder(job, tmp_path):
    path = write_csv(tmp_path / "t.csv", [{**row, "y": row["y"] + 5} for row in GOOD])
    with pytest.raises(ValueError, match="because y is not 0 or 1; correct the schema or the file"):
        job(SMALL, [path], tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    job(replace(SMALL, label=Label(column="y", at_least=6)), [path], tmp_path / "out")


def test_types_that_cannot_be_meant_are_named(job, tmp_path):
    path = write_parquet(tmp_path / "t.parquet", [{"y": 1, "x": datetime(2020, 1, 1, tzinfo=UTC), "s": 1.5}])
    with pytest.raises(ValueError, match=r"t\.parquet: column 'x' holds Datetime.*takes numbers"):
        job(SMALL, [path], tmp_path / "out")


def test_files_given_twice_missing_or_of_another_job_are_refused(job, tmp_path):
    path = write_csv(tmp_path / "t.csv", GOOD)
    with pytest.raises(ValueError, match="given more than once"):
        job(SMALL, [path, path], tmp_path / "out")
    (tmp_path / "link.csv").symlink_to(path)
    (tmp_path / "hard.csv").hardlink_to(path)
    for link in ("link.csv", "hard.csv"):
        with pytest.raises(ValueError, match=rf"{link} is given more than once \(.*t\.csv is the same file"):
            job(SMALL, [path, tmp_path / link], tmp_path / "out")
    with pytest.raises(ValueError, match=r"none\.csv is not a file"):
        job(SMALL, [tmp_path / "none.csv"], tmp_path / "out")
    job(SMALL, [path], tmp_path / "out")
    before = digests(tmp_path / "out")
    job(SMALL, [path], tmp_path / "out")
    assert digests(tmp_path / "out") == before
    with pytest.raises(ValueError, match="another configuration"):
        job(schema_of("nothing", 1), [write_jsonl(tmp_path / "t.jsonl", [ROW])], tmp_path / "out")


ROW = {"stars": 1, "price": 1.0, "shop.name": "a", "item": 1, "tags": ["a"], "when": 1, "fold": "test"}


def test_compressed_texts_and_several_files(job, tmp_path):
    whole = write_csv(tmp_path / "t.csv", GOOD)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = tmp_path / "a" / "part.csv.gz", tmp_path / "b" / "part.csv.gz"
    for part, rows in ((first, GOOD[:20]), (second, GOOD[20:])):
        part.write_bytes(gzip.compress(write_csv(tmp_path / "part.csv", rows).read_bytes()))
    job(SMALL, [whole], tmp_path / "whole")
    manifest = job(SMALL, [first, second], tmp_path / "parts")
    assert [file["name"] for file in manifest.provenance["identity"]["inputs"]] == [
        "a/part.csv.gz",
        "b/part.csv.gz",
    ]
    parts, expected = digests(tmp_path / "parts"), digests(tmp_path / "whole")
    assert {**parts, "dataset.json": ""} == {**expected, "dataset.json": ""}
    second.write_bytes(second.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b/part\.csv\.gz: compressed data is cut off"):
        job(SMALL, [first, second], tmp_path / "cut", max_bad_ratio=0.5)


def test_a_vocabulary_that_does_not_fit_says_what_would(job, tmp_path):
    path = write_csv(tmp_path / "t.csv", GOOD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data.convert.job._VALUE_BYTES", 1 << 30)
        with pytest.raises(ValueError, match=r"the vocabularies need --memory \d+M, not 600M"):
            job(SMALL, [path], tmp_path / "out", memory_bytes=600 << 20, num_processes=1)
    assert job(SMALL, [path], tmp_path / "out").num_rows == 50
