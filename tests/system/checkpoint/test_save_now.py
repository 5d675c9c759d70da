"""A save with a time limit: one verdict for all ranks, whichever of them is slow."""

import pytest

from tests.system.checkpoint import save_now_worker


@pytest.mark.system
@pytest.mark.timeout(120)
def test_a_save_given_up_on_one_rank_is_given_up_on_all(start_ranks, tmp_path):
    start_ranks(save_now_worker.main, tmp_path, world_size=2).wait(timeout_s=100)
