"""MFU, MRU and incremental saving agree with simple oracles for any sequence of events."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cpr.priority.groups import (
    PRIORITISED,
    TABLE_ROWS,
    events,
    make_tracker,
    play,
    rows_of_table,
    zeros,
)

RATIO = 0.4


class Oracle:
    """Keeps all lookups of each prioritised table since the row's last save: `[(time, row)]`."""

    def __init__(self, rank, bounded=True):
        self.rank, self.bounded = rank, bounded
        self.log = {table: [] for table in PRIORITISED}
        self.time = 0
        self.chosen = {}

    def see(self, ids):
        self.time += 1
        for table, log in self.log.items():
            log += [(self.time, row) for row in rows_of_table(ids, table)]

    see_while_saving = see

    def numbers(self, table):
        times = {}
        for time, row in self.log[table]:
            times.setdefault(row, []).append(time)
        return {row: self.rank(of_row) for row, of_row in times.items()}

    def choose(self, table):
        ranked = sorted((-number, row) for row, number in self.numbers(table).items())
        budget = math.ceil(RATIO * TABLE_ROWS[table]) if self.bounded else len(ranked)
        chosen = sorted(row for _, row in ranked[:budget])
        self.chosen[table] = (self.time, chosen)
        return chosen

    def end_save(self, is_committed):
        for table, (chosen_at, chosen) in self.chosen.items():
            if is_committed:
                self.log[table] = [
                    (time, row) for time, row in self.log[table] if row not in chosen or time > chosen_at
                ]

    def forget(self, table, rows):
        self.log[table] = [(t, row) for t, row in self.log[table] if rows is not None and row not in rows]


SCHEMES = {
    "mfu": lambda: Oracle(len),
    "mru": lambda: Oracle(max),
    "touched": lambda: Oracle(len, bounded=False),
}


@pytest.mark.system
@pytest.mark.parametrize("scheme", SCHEMES)
@given(history=st.lists(events, max_size=12))
def test_choice_agrees_with_the_oracle(scheme, history):
    tracker, oracle = make_tracker(scheme=scheme, ratio=RATIO), SCHEMES[scheme]()
    play(tracker, oracle, history)
    for table in PRIORITISED:
        assert tracker.choose(table).tolist() == oracle.choose(table)


@given(history=st.lists(events, max_size=12))
def test_counts_are_exact(history):
    tracker, oracle = make_tracker(scheme="mfu", ratio=RATIO), SCHEMES["mfu"]()
    play(tracker, oracle, history)
    for table in PRIORITISED:
        counts = tracker.values(table)
        assert {row: count for row, count in enumerate(counts.tolist()) if count} == oracle.numbers(table)


@pytest.mark.system
@pytest.mark.parametrize("scheme", SCHEMES)
@given(history=st.lists(events, max_size=6), after=st.lists(events, max_size=6))
def test_memory_survives_a_worker(scheme, history, after):
    """A worker dies during a save; the next one continues as if the save had failed."""
    memory = {}

    def allocate(name, dtype, numel):
        return memory.setdefault(name, zeros(name, dtype, numel))

    first, oracle = make_tracker(scheme=scheme, ratio=RATIO, allocate=allocate), SCHEMES[scheme]()
    play(first, oracle, history)
    for table in PRIORITISED:
        first.choose(table)
    second = make_tracker(scheme=scheme, ratio=RATIO, allocate=allocate)
    second.load_state_dict(first.state_dict())
    play(second, oracle, after)
    for table in PRIORITISED:
        assert second.choose(table).tolist() == oracle.choose(table)
