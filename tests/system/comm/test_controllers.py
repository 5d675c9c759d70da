"""Controllers in a group of processes: ranks that have reasons to disagree decide alike, and none hangs."""

from functools import partial

import pytest

from tests.system.comm import controllers_worker as worker
from tests.system.ranks import in_group

pytestmark = [pytest.mark.system, pytest.mark.timeout(90)]


def test_ranks_that_differ_in_everything_decide_alike(start_ranks):
    work = [
        worker.sums_are_the_same_bits,
        partial(worker.choices_are_the_same, worker.gravac),
        partial(worker.choices_are_the_same, worker.pareto),
        worker.parted_replicas_meet,
    ]
    start_ranks(in_group, *work, world_size=3).wait(timeout_s=60)
