"""Schedules on several ranks train what their rule says."""

import pytest

from tests.system.ranks import in_group
from tests.system.training import pipeline_worker as worker


@pytest.mark.system
@pytest.mark.timeout(120)
@pytest.mark.parametrize("world_size", [2, 3])
def test_prefetching_changes_no_bit(start_ranks, world_size):
    start_ranks(in_group, worker.check_prefetch, world_size=world_size).wait(timeout_s=100)
