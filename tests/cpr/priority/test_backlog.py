"""Logged lookups are not lost, reordered or counted twice."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from cpr.priority import backlog
from cpr.priority.backlog import Backlog
from tests.cpr.priority.groups import batches, make_group, make_lookups, make_tracker, zeros


class SurvivingMemory:
    """Memory that survives a worker."""

    def __init__(self):
        self.tensors = {}

    def __call__(self, name, dtype, numel):
        return self.tensors.setdefault(name, zeros(name, dtype, numel))


def kept(period, passes):
    """Joint rows that are kept of consecutive passes."""
    rows = torch.cat([make_lookups(each).rows for each in passes]) if passes else torch.zeros(0)
    return rows[::period].tolist()


@given(passes=st.lists(st.one_of(batches, st.just("sweep")), max_size=12), period=st.integers(1, 3))
def test_every_kept_lookup_is_swept_once_and_in_order(passes, period):
    capacity, backlog.CAPACITY = backlog.CAPACITY, 40  # a few passes, and less than the longest
    try:
        swept, position = [], 0

        def take(found):
            swept.extend(row for each in found for row in each.rows.tolist())

        waiting = Backlog(make_group(scheme="mfu"), take, period)
        for each in passes:
            if each == "sweep":
                waiting.sweep()
                continue
            lookups = make_lookups(each)
            waiting.see(lookups, first=-position % period)
            position += lookups.ids.numel()
        waiting.sweep()
        assert swept == kept(period, [each for each in passes if each != "sweep"])
    finally:
        backlog.CAPACITY = capacity


def test_logged_ids_are_copies():
    tracker = make_tracker(scheme="mfu")
    lookups = make_lookups([[1, 1], [], [], []])
    tracker.see(lookups)
    lookups.ids.fill_(3)
    assert tracker.values(0).tolist() == [0, 2, 0, 0, 0, 0, 0, 0, 0]


def test_incomplete_entry_is_ignored():
    memory = SurvivingMemory()
    worker = make_tracker(scheme="mfu", allocate=memory)
    worker.see(make_lookups([[1], [], [], []]))
    log = memory.tensors["group-backlog"]
    used = int(log[0])
    worker.see(make_lookups([[2], [], [], []]))
    log[0] = used  # as if it had died before the last number of the second
    successor = make_tracker(scheme="mfu", allocate=memory)
    assert successor.values(0).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]
