"""Counting and ranking against a Counter, with runs and windows so small that every path is taken."""

from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from data.criteo import CATEGORY_NAMES
from data.jobs.location import Location
from data.prepare import vocabulary
from data.prepare.parse.inputs import find_inputs, plan
from data.prepare.pieces import read_records
from data.prepare.vocabulary import CountSpan, RankCategory, run_path, vocabulary_size
from tests.data.prepare.conftest import make_lines


@pytest.fixture(autouse=True)
def tiny_windows(monkeypatch):
    monkeypatch.setattr(vocabulary, "FAN_IN", 3)
    monkeypatch.setattr(vocabulary, "WINDOW_ENTRIES", 2)


def rank(folder, pieces, min_count, cap):
    runs = []
    for index, values in enumerate(pieces):
        run = run_path(Location.of(folder), f"day=0/part-{index}", "cat_0")
        distinct, counts = np.unique(np.array(values, np.uint32), return_counts=True)
        run.local.write_bytes(vocabulary._entries(distinct, counts).tobytes())
        runs.append(run)
    path = folder / "cat_0.npy"
    path.unlink(missing_ok=True)
    task = RankCategory(
        name="cat_0",
        runs=tuple(runs),
        scratch=Location.of(folder),
        path=Location.of(path),
        min_count=min_count,
        cap=cap,
    )
    task.run(lambda progress: None)
    return path


def expected(pieces, min_count, cap):
    counts = Counter(value for values in pieces for value in values)
    frequent = [value for value, count in counts.items() if count >= min_count]
    ranked = sorted(frequent, key=lambda value: (-counts[value], value))[: cap - 2]
    return {value: rank + 2 for rank, value in enumerate(ranked)}


VALUES = st.integers(0, 12) | st.integers(2**32 - 4, 2**32 - 1)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.lists(st.lists(VALUES, max_size=25), min_size=1, max_size=11), st.integers(1, 4), st.integers(3, 20)
)
def test_ids_are_by_count_then_value(tmp_path, pieces, min_count, cap):
    path = rank(tmp_path, pieces, min_count, cap)
    values, ids = np.load(path)
    found = dict(zip(values.tolist(), ids.tolist(), strict=True))
    assert found == expected(pieces, min_count, cap)
    assert values.tolist() == sorted(values.tolist())
    assert vocabulary_size(Location.of(path)) == len(found) + 2


def test_a_finished_vocabulary_is_not_made_again(tmp_path):
    path = rank(tmp_path, [[1, 1, 2]], 1, 10)
    before = path.stat().st_mtime_ns
    made = {"scratch": Location.of(tmp_path), "path": Location.of(path)}
    RankCategory(name="cat_0", runs=(), **made, min_count=1, cap=10).run(lambda p: None)
    assert path.stat().st_mtime_ns == before


@pytest.fixture
def records(raw_file, tmp_path):
    """Records of the seven pieces of three lines; in most of them no line starts."""
    (raw,) = find_inputs([Location.of(raw_file(make_lines(3)))], None)
    for span in plan(raw):
        CountSpan(span=span, finished=(), records=Location.of(tmp_path), block_bytes=1000).run(
            lambda progress: None
        )
    return list(read_records(Location.of(tmp_path)).values())


def test_a_piece_in_which_no_line_starts_has_empty_runs(records, tmp_path):
    empty = [record for record in records if not record.num_lines]
    assert len(records) == 7
    assert len(empty) >= 4
    for record in empty:
        assert {run_path(tmp_path, record.name, name).stat().st_size for name in CATEGORY_NAMES} == {0}
    assert sum(record.num_lines for record in records) == 3
