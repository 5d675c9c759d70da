"""Schedules on several ranks train what their rule says."""

from functools import partial

import pytest

from tests.system.ranks import in_group
from tests.system.training import pipeline_worker as worker


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3])
def test_prefetching_changes_no_bit(start_ranks, world_size):
    start_ranks(in_group, worker.check_prefetch, world_size=world_size).wait(timeout_s=100)


@pytest.mark.system
@pytest.mark.timeout(120)
def test_two_halves_are_one_batch(start_ranks):
    ranks = start_ranks(in_group, worker.check_waves, worker.check_refusals, world_size=2)
    ranks.wait(timeout_s=100)


@pytest.mark.system
@pytest.mark.timeout(120)
def test_late_gradients_and_rows_are_those_of_a_simulator(start_ranks):
    delayed = [partial(worker.check_delayed, late_rows) for late_rows in ("stale", "predicted")]
    ranks = start_ranks(in_group, *delayed, worker.check_tick_tock, world_size=2)
    ranks.wait(timeout_s=100)
