"""The parts of the converter, each against plain Python: records, ranks, vocabularies, sums."""

import csv
import io
from collections import Counter
from contextlib import closing
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from data.convert.counts import RankFeature, write_counts
from data.convert.moments import Moments
from data.convert.order import Sorted
from data.convert.read.delimited import DelimitedReader
from data.jobs.location import Location
from data.text.content import open_content
from data.text.streams import LineReader


def records_of(path, block_bytes):
    lines = LineReader(open_content(Location.of(path), [0]), 0, block_bytes)
    frames, rows, bad, count = [], [], [], 0
    for block in DelimitedReader(lines, ",", ["a", "b"]).blocks():
        assert block.num_records == len(block.rows) + len(block.bad)
        frames += block.frame.rows()
        rows += block.rows.tolist()
        bad += [(one.row, one.reason) for one in block.bad]
        count += block.num_records
    lines.content.close()
    assert sorted([*rows, *(row for row, _ in bad)]) == list(range(1, count + 1))
    return frames, rows, bad


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.text(st.characters(codec="utf-8")), st.sampled_from(["", "x", 'a"b', "c,d\n"]))),
    st.integers(1, 60),
)
def test_rows_that_python_writes_are_read_back_with_any_block(tmp_path_factory, rows, block_bytes):
    rows = [(first.replace("\r", ""), second) for first, second in rows]
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows([("a", "b"), *rows])
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_text(stream.getvalue(), newline="")
    assert records_of(path, block_bytes) == (rows, list(range(1, len(rows) + 1)), [])


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text('ab",\n\r ', max_size=60), st.integers(1, 60))
@example('1,"2\n3,4\n5,6', 1)
@example('"', 1)
@example("\n\n1,2\r\n\r\n", 3)
def test_any_text_gives_the_same_records_with_any_block(tmp_path_factory, text, block_bytes):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_bytes(b"a,b\n" + text.encode())
    assert records_of(path, block_bytes) == records_of(path, 1 << 20)


@given(
    st.lists(st.lists(st.integers(-3, 3) | st.integers(-(2**62), 2**62), max_size=8), min_size=1, max_size=5),
    st.booleans(),
)
def test_cuts_are_those_of_one_stable_sort(runs, timed):
    runs = [sorted(run) if timed else [0] * len(run) for run in runs]
    times = [np.array(run, np.int64) for run in runs] if timed else None
    whole = sorted(
        ((time, run, at) for run, listed in enumerate(runs) for at, time in enumerate(listed)),
        key=lambda entry: entry[0],
    )
    ranks = range(len(whole) + 1)
    cuts = Sorted(times, np.array([len(run) for run in runs], np.int64)).cuts(list(ranks))
    for rank in ranks:
        taken = Counter(run for _, run, _ in whole[:rank])
        assert cuts[rank].tolist() == [taken[run] for run in range(len(runs))]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("dtype", [pl.String, pl.Int64])
@given(
    runs=st.lists(st.lists(st.integers(-20, 20)), min_size=1, max_size=6),
    min_count=st.integers(1, 4),
    max_rows=st.integers(3, 30),
)
def test_vocabulary_is_ordered_by_count_and_value(
    tmp_path_factory, monkeypatch, dtype, runs, min_count, max_rows
):
    monkeypatch.setattr("data.convert.counts.FAN_IN", 2)
    monkeypatch.setattr("data.convert.counts.WINDOW_ROWS", 3)
    folder = Location.of(tmp_path_factory.mktemp("counts"))
    paths = tuple(folder / f"{at}.counts" for at in range(len(runs)))
    for path, run in zip(paths, runs, strict=True):
        write_counts(pl.Series(run, dtype=pl.Int64).cast(dtype), path)
    task = RankFeature(
        name="f",
        runs=paths,
        scratch=folder,
        path=folder / "v.parquet",
        min_count=min_count,
        max_rows=max_rows,
    )
    task.run(print)
    counts = Counter((str if dtype == pl.String else int)(value) for run in runs for value in run)
    kept = sorted((-count, value) for value, count in counts.items() if count >= min_count)[: max_rows - 2]
    found = pl.read_parquet(folder.local / "v.parquet")
    assert found["value"].to_list() == [value for _, value in kept]
    assert found["value"].dtype == dtype
    assert found["id"].to_list() == list(range(2, 2 + len(kept)))


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(FLOATS)))
def test_moments_are_exact_in_any_grouping(groups):
    found = Moments.sum(Moments.of(np.array(group, np.float32)) for group in groups)
    values = [Fraction(value) for group in groups for value in group]
    assert found == Moments.of(np.array([float(value) for value in values], np.float32))
    if values:
        mean = sum(values) / len(values)
        variance = sum((value - mean) ** 2 for value in values) / len(values)
        assert found.mean == float(mean)
        assert found.std == pytest.approx(float(variance) ** 0.5 or 1.0, rel=1e-12)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(["a", "b", "é", '"', '""', '"",', ",", "\n", '"\n', "\r\n"]), max_size=20))
@example(["a", ",", '""', "\n", '"', "b", "\n", '""', '"', ",", "a", "\n"])
@example(['""', "a", ",", "b", "\n"])
def test_polars_and_python_read_quotes_alike(tmp_path_factory, pieces):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    path.write_bytes(("x,y\n" + "".join(pieces)).encode())

    def read(*, slow):
        with closing(open_content(Location.of(path), [0])) as content, pytest.MonkeyPatch.context() as patch:
            if slow:
                patch.setattr(DelimitedReader, "_fast", lambda *_: None)
            blocks = list(DelimitedReader(LineReader(content, 0, 1 << 12), ",", []).blocks())
        rows = [(at, row) for block in blocks for at, row in zip(block.rows, block.frame.rows(), strict=True)]
        return rows, [bad for block in blocks for bad in block.bad]

    assert read(slow=False) == read(slow=True)
