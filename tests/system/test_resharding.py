"""A matrix of world sizes and sharding plans: what one saved, every other loads."""

from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("resharding_worker.py")
SIZES = (1, 2, 4)


@pytest.mark.system
@pytest.mark.timeout(240)
def test_wish_2_load_at_another_world_size_and_under_another_plan(start, tmp_path):
    """Table-wise, column-wise, row-wise and data-parallel on 1, 2 and 4 ranks: 81 combinations."""
    jobs = [start(WORKER, tmp_path, ",".join(map(str, SIZES)), ranks=size) for size in SIZES]
    for job in jobs:
        _, said = job.communicate(timeout=200)
        assert job.returncode == 0, said[-4000:]
    assert len(list(tmp_path.glob("*-*/saves/00000001/manifest.json"))) == 9
