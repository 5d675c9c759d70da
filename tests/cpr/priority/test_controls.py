"""Control schemes, which ignore training."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cpr.priority.groups import PRIORITISED, TABLE_ROWS, make_lookups, make_tracker


def save(tracker, table=0):
    rows = tracker.choose(table)
    tracker.confirm(table, rows)
    return rows.tolist()


@given(ratio=st.floats(0.01, 1.0), saves=st.integers(1, 12))
def test_round_robin_saves_all_rows_equally_often(ratio, saves):
    tracker = make_tracker(scheme="round_robin", ratio=ratio)
    for table in PRIORITISED:
        budget = math.ceil(ratio * TABLE_ROWS[table])
        counts = [0] * TABLE_ROWS[table]
        for _ in range(saves):
            rows = save(tracker, table)
            assert len(set(rows)) == len(rows) == budget
            assert rows == sorted(rows)
            for row in rows:
                counts[row] += 1
        assert max(counts) - min(counts) <= 1


def test_round_robin_repeats_rows_that_were_not_saved():
    tracker = make_tracker(scheme="round_robin", ratio=0.3)
    first = tracker.choose(0)
    tracker.take_back(0, first)
    assert save(tracker) == first.tolist()
    assert save(tracker) != first.tolist()


def test_random_rows_differ_by_save_and_seed():
    tracker = make_tracker(table_rows=(1000, 5), prioritised=(0,), scheme="random", seed=1)
    other = make_tracker(table_rows=(1000, 5), prioritised=(0,), scheme="random", seed=2)
    saves = [save(tracker), save(tracker), save(other)]
    for rows in saves:
        assert rows == sorted(set(rows))
        assert len(rows) == 125
        assert 0 <= rows[0] < 200
        assert 800 < rows[-1] < 1000
    assert len({tuple(rows) for rows in saves}) == 3


@pytest.mark.parametrize("scheme", ["random", "round_robin", "never"])
def test_lookups_are_ignored(scheme):
    tracker, untouched = make_tracker(scheme=scheme), make_tracker(scheme=scheme)
    assert not tracker.sees_lookups
    tracker.see(make_lookups([[1, 2, 3], [], [4], []]))
    tracker.forget(0, torch.tensor([1]))
    assert tracker.num_bytes == 0
    assert torch.equal(tracker.choose(0), untouched.choose(0))
    assert (tracker.choose(0).numel() == 0) == (scheme == "never")
