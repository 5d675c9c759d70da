"""SCAR agrees with distances by brute force from the saved rows."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.priority import change
from cpr.priority.prioritizer import TRACKERS
from tests.cpr.priority.groups import PRIORITISED, TABLE_ROWS, make_group

RATIO = 0.4
values = st.lists(st.integers(-3, 3).map(float), min_size=2 * 9, max_size=2 * 9)
events = st.one_of(
    st.tuples(st.just("change"), values),
    st.tuples(st.just("save"), values, st.booleans()),
    st.tuples(st.just("forget"), st.none() | st.sets(st.integers(0, 5))),
)


def brute_force(live, saved, budget):
    """Distances of `[[x, y], ...]`, and the rows with the largest ones."""
    distances = [math.dist(now, then) for now, then in zip(live.tolist(), saved.tolist(), strict=True)]
    ranked = sorted((-distance, row) for row, distance in enumerate(distances) if distance)
    return distances, sorted(row for _, row in ranked[:budget])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(change, "CHUNK_ELEMENTS", 4)


class Case:
    """A tracker, its tables, and the saved tables."""

    def __init__(self):
        self.group = make_group(scheme="scar", ratio=RATIO)
        self.tracker = TRACKERS["scar"](self.group)
        self.live = {table: self.group.tables[table].shard.weights for table in PRIORITISED}
        self.saved = {table: weights.clone() for table, weights in self.live.items()}

    def change(self, numbers):
        for weights in self.live.values():
            weights.copy_(torch.tensor(numbers[: weights.numel()]).view_as(weights))

    def save(self, meanwhile, is_committed):
        taken = {}
        for table, live in self.live.items():
            rows = self.choose(table)
            taken[table] = (rows, live[rows].clone())
        self.change(meanwhile)
        for table, (rows, then) in taken.items():
            (self.tracker.confirm if is_committed else self.tracker.take_back)(table, rows)
            if is_committed:
                self.saved[table][rows] = then

    def forget(self, rows):
        for table, live in self.live.items():
            chosen = torch.arange(TABLE_ROWS[table]) if rows is None else torch.tensor(sorted(rows)).long()
            self.tracker.forget(table, None if rows is None else chosen)
            self.saved[table][chosen] = live[chosen]

    def choose(self, table):
        budget = math.ceil(RATIO * TABLE_ROWS[table])
        distances, expected = brute_force(self.live[table], self.saved[table], budget)
        torch.testing.assert_close(self.tracker.distances(table), torch.tensor(distances), rtol=1e-6, atol=0)
        chosen = self.tracker.choose(table)
        assert chosen.tolist() == expected
        return chosen


@given(st.lists(events, max_size=10))
def test_distances_agree_with_brute_force(history):
    case = Case()
    for kind, *what in history:
        getattr(case, kind)(*what)
    for table in PRIORITISED:
        case.choose(table)


def test_half_precision_is_compared_in_fp32():
    group = make_group(scheme="scar", dtype=torch.float16)
    tracker = TRACKERS["scar"](group)
    group.tables[0].shard.weights[4] = 60_000.0  # whose square fp16 cannot hold
    assert tracker.distances(0)[4].item() == pytest.approx(60_000 * math.sqrt(2), rel=1e-6)
    assert tracker.choose(0).tolist() == [4]
