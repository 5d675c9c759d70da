"""Links are measured by all ranks together."""

import pytest

from tests.system import cluster_worker

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]


def test_all_ranks_agree(start_ranks):
    start_ranks(cluster_worker.measure_together, world_size=4).wait(timeout_s=90)
