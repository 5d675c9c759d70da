"""MFU counts a sample of the passes only where that chooses nearly the same rows."""

import numpy as np
import pytest
import torch

from cpr.priority.frequency import MOST, SURE
from cpr.priority.tracker import top_rows
from cpr.shards.lookups import Lookups
from tests.cpr.priority.groups import PRIORITISED, make_layout, make_lookups, make_tracker, zeros

ROWS, BUDGET_SHARE = 4000, 0.125


def tracker_of(rows=ROWS, **options):
    return make_tracker(table_rows=(rows, 1), prioritised=(0,), scheme="mfu", ratio=BUDGET_SHARE, **options)


def see(tracker, ids, rows=ROWS):
    ends = torch.tensor([0, ids.numel(), ids.numel(), ids.numel()])
    if tracker.wants_pass():
        tracker.see(Lookups(layout=make_layout((rows, 1)), ids=ids, ends=ends))


def choose(tracker):
    rows = tracker.choose(0)
    tracker.confirm(0, rows)
    return rows


def zipf(exponent, num, seed):
    """Ids of some passes, and how often each is in them."""
    generator = np.random.default_rng(seed)
    shares = np.arange(1, ROWS + 1) ** -exponent
    shares = np.random.default_rng(5).permutation(shares / shares.sum())
    ids = torch.from_numpy(generator.choice(ROWS, num, p=shares))
    return ids, torch.bincount(ids, minlength=ROWS)


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("lookups_per_row", [100, 600])
def test_saves_of_rows_chosen_from_a_sample_hold_as_many_lookups(exponent, lookups_per_row):
    """Of three saves; lookups of rows that were not saved wait for the next one."""
    tracker, periods = tracker_of(), []
    sampled, counted = torch.zeros(2, ROWS, dtype=torch.int64)
    saved_of_sampled = saved_of_counted = 0
    for interval in range(3):
        ids, counts = zipf(exponent, lookups_per_row * ROWS, interval)
        for of_pass in ids.split(2000):
            see(tracker, of_pass)
        sampled += counts
        counted += counts
        rows, most = choose(tracker), top_rows(counted, int(BUDGET_SHARE * ROWS))
        saved_of_sampled += int(sampled[rows].sum())
        saved_of_counted += int(counted[most].sum())
        sampled[rows] = counted[most] = 0
        periods.append(tracker.period)
    assert saved_of_sampled >= 0.99 * saved_of_counted
    assert max(periods) > 1 or lookups_per_row == 100


def test_every_pass_is_counted_until_the_least_used_row_of_a_choice_is_sure():
    tracker = tracker_of(rows=8)  # a budget of one row
    for _ in range(2 * SURE - 1):
        see(tracker, torch.tensor([3]), rows=8)
    choose(tracker)
    assert tracker.period == 1
    for _ in range(2 * SURE):
        see(tracker, torch.tensor([3]), rows=8)
    choose(tracker)
    assert tracker.period == 2
    for _ in range(2 * SURE):
        see(tracker, torch.tensor([3, 4]), rows=8)
    assert tracker.values(0)[3] == tracker.values(0)[4] == 2 * SURE, "each counted pass counts twice"
    tracker.forget(0, None)
    assert tracker.period == 1


def test_a_table_whose_changed_rows_fit_keeps_all_passes_counted():
    tracker = make_tracker(scheme="mfu", ratio=0.4)
    for _ in range(100 * SURE):
        tracker.see(make_lookups([[0, 1, 2, 3, 4, 5], [], [0], []]))
    for table in PRIORITISED:
        tracker.confirm(table, tracker.choose(table))
    assert tracker.period == 1
    tracker.see(make_lookups([[8], [], [5], []]))
    assert tracker.choose(0).tolist()[-1] == 8
    assert tracker.choose(2).tolist() == [5]


@pytest.mark.parametrize("cycle", [2, 3, 4, 8])
def test_passes_that_come_round_again_are_all_counted(cycle):
    tracker = tracker_of(rows=8)
    for _ in range(MOST * SURE):
        see(tracker, torch.tensor([0]), rows=8)
    choose(tracker)
    assert tracker.period == MOST
    num = 400 * cycle
    for number in range(num):
        see(tracker, torch.tensor([number % cycle]), rows=8)
    counts = tracker.values(0)[:cycle]
    assert counts.sum() == num
    assert (counts > 0.7 * 400).all()


def test_the_successor_of_a_worker_samples_as_it_would_have():
    memory = {}

    def allocate(name, dtype, numel):
        return memory.setdefault(name, zeros(name, dtype, numel))

    first = tracker_of(rows=8, allocate=allocate)
    for _ in range(4 * SURE):
        see(first, torch.tensor([3]), rows=8)
    choose(first)
    for number in range(30):
        see(first, torch.tensor([number % 8]), rows=8)
    kept = {name: tensor.clone() for name, tensor in memory.items()}
    second = tracker_of(rows=8, allocate=lambda name, dtype, numel: kept[name])
    second.load_state_dict(first.state_dict())
    for number in range(30):
        for each in (first, second):
            see(each, torch.tensor([number % 8]), rows=8)
    assert torch.equal(first.values(0), second.values(0))
