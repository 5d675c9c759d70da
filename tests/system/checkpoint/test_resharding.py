"""A matrix of world sizes and sharding plans: what one saved, every other loads."""

import pytest

from tests.system.checkpoint import resharding_worker

SIZES = (1, 2, 4)


@pytest.mark.system
@pytest.mark.timeout(240)
def test_wish_2_load_at_another_world_size_and_under_another_plan(start_ranks, tmp_path):
    """Table-wise, column-wise, row-wise and data-parallel on 1, 2 and 4 ranks: 81 combinations."""
    jobs = [start_ranks(resharding_worker.main, tmp_path, SIZES, world_size=size) for size in SIZES]
    for job in jobs:
        job.wait(timeout_s=200)
    assert len(list(tmp_path.glob("*-*/saves/00000001-*/manifest.json"))) == 9
