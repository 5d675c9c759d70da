"""Leaving the block of `PartialRecovery`, which all ranks do alike."""

import pytest

from tests.system import leaving_worker


@pytest.mark.system
@pytest.mark.timeout(100)
def test_one_rank_that_leaves_alone_waits_for_the_others_so_long_and_loses_nothing(start_ranks, tmp_path):
    start_ranks(leaving_worker.main, tmp_path, world_size=2).wait(timeout_s=80)
