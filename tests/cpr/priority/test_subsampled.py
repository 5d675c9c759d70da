"""SSU: bounded lists of offered ids without duplicates, and their occupancy."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cpr.priority.groups import (
    PRIORITISED,
    TABLE_ROWS,
    batches,
    events,
    make_layout,
    make_lookups,
    make_tracker,
    play,
    zeros,
)

BUDGETS = {
    ratio: [math.ceil(ratio * TABLE_ROWS[table]) for table in PRIORITISED] for ratio in (0.2, 0.5, 1.0)
}


class Offered:
    """Oracle: the lookups of each table that exact sampling offers, since the row's last save."""

    def __init__(self, tracker, period, budgets):
        self.tracker, self.period, self.budgets = (
            tracker,
            period,
            dict(zip(PRIORITISED, budgets, strict=True)),
        )
        self.position = 0
        self.may_be = {table: set() for table in PRIORITISED}
        self.since_chosen = {table: set() for table in PRIORITISED}
        self.chosen = {}

    def see(self, ids):
        place = self.position
        for of_feature, table in zip(ids, make_layout().feature_tables, strict=True):
            for row in of_feature:
                if place % self.period == 0 and table in self.may_be:
                    self.may_be[table].add(row)
                    self.since_chosen[table].add(row)
                place += 1
        self.position = place

    see_while_saving = see

    def choose(self, table):
        """Check the tracker's list and return it."""
        slots = self.tracker._lists[table]
        found = sorted(slots[slots != 0].abs().sub(1).tolist())
        assert len(found) <= self.budgets[table]
        assert len(set(found)) == len(found)
        assert set(found) <= self.may_be[table]
        self.chosen[table] = found
        self.since_chosen[table] = set()
        return found

    def end_save(self, is_committed):
        for table, chosen in self.chosen.items():
            if is_committed:
                self.may_be[table] -= set(chosen) - self.since_chosen[table]

    def forget(self, table, rows):
        self.may_be[table] = set() if rows is None else self.may_be[table] - rows


@given(
    history=st.lists(events, max_size=12),
    period=st.integers(1, 3),
    ratio=st.sampled_from(sorted(BUDGETS)),
)
def test_lists_are_bounded_and_contain_offered_ids_once(history, period, ratio):
    tracker = make_tracker(scheme="ssu", ratio=ratio, sampling_period=period)
    oracle = Offered(tracker, period, BUDGETS[ratio])
    play(tracker, oracle, history)
    for table in PRIORITISED:
        assert tracker.choose(table).tolist() == oracle.choose(table)


def test_only_every_third_id_is_offered():
    tracker = make_tracker(scheme="ssu", ratio=1.0, sampling_period=3)
    chosen = []
    for row in range(6):
        tracker.see(make_lookups([[row], [], [], []]))
        chosen.append(tracker.choose(0).tolist())
        tracker.take_back(0, torch.tensor(chosen[-1]))
    assert chosen == [[0], [0], [0], [0, 3], [0, 3], [0, 3]]


def big_tracker(rows, ratio):
    return make_tracker(table_rows=(rows, 1), prioritised=(0,), scheme="ssu", ratio=ratio, sampling_period=1)


def see(tracker, rows, ids):
    tracker.see(make_lookups([ids, [], []], make_layout((rows, 1))))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 1.0, 4.0])
def test_occupancy_of_the_list(share):
    """Different ids, `share` times the slots, are spread over them as if at random."""
    rows, places = 100_000, 10_000
    tracker = big_tracker(rows, places / rows)
    ids = torch.randperm(rows, generator=torch.Generator().manual_seed(5))[: int(share * places)]
    for some in ids.split(500):
        see(tracker, rows, some.tolist())
    assert tracker.choose(0).numel() == pytest.approx((1 - math.exp(-share)) * places, rel=0.02)


def test_frequent_rows_stay_in_a_full_list():
    rows, hot = 20_000, list(range(0, 20_000, 100))
    tracker = big_tracker(rows, 0.05)
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        cold = torch.randint(0, rows, (300,), generator=generator).tolist()
        see(tracker, rows, cold + hot)
    kept = set(tracker.choose(0).tolist())
    assert len(kept & set(hot)) > 0.8 * len(hot)
    assert len(kept) > 0.9 * 0.05 * rows


def test_ids_being_saved_take_no_slots():
    rows = 1000
    tracker, fresh = big_tracker(rows, 0.1), big_tracker(rows, 0.1)
    see(tracker, rows, list(range(100)))
    chosen = tracker.choose(0)
    for each in (tracker, fresh):
        see(each, rows, list(range(500, 600)))
    tracker.confirm(0, chosen)
    assert torch.equal(tracker.choose(0), fresh.choose(0))


@given(history=st.lists(events, max_size=6), after=st.lists(batches, max_size=6))
def test_memory_and_state_survive_a_worker(history, after):
    memory = {}

    def allocate(name, dtype, numel):
        return memory.setdefault(name, zeros(name, dtype, numel))

    first = make_tracker(scheme="ssu", ratio=0.5, allocate=allocate)
    play(first, Offered(first, 2, BUDGETS[0.5]), history)
    state = {name: tensor.clone() for name, tensor in memory.items()}
    second = make_tracker(scheme="ssu", ratio=0.5, allocate=lambda name, dtype, numel: state[name])
    second.load_state_dict(first.state_dict())
    for ids in after:
        first.see(make_lookups(ids))
        second.see(make_lookups(ids))
    for table in PRIORITISED:
        assert torch.equal(first.choose(table), second.choose(table))
