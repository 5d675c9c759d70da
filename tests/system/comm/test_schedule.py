"""Priority and shared work among real ranks: equal bits on all of them, whatever they do first."""

import pytest

from tests.system.comm import schedule_worker as worker
from tests.system.ranks import in_group


@pytest.mark.system
@pytest.mark.timeout(120)
def test_ranks_stay_equal(start_ranks):
    work = (
        worker.check_norms,
        worker.check_clipping,
        worker.check_large_batch_optimizers,
        worker.check_that_all_ranks_hear_of_other_parameters,
        worker.check_priority,
    )
    start_ranks(in_group, *work, world_size=3).wait(timeout_s=90)
