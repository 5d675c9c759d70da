"""Collectives, exchanges, hooks and P3 between real ranks; one start of processes per test."""

import pytest

from tests.system.comm import (
    collectives_worker,
    disagreement_worker,
    exchange_worker,
    hook_worker,
    replicas_worker,
    residual_worker,
    schedule_worker,
)
from tests.system.comm.common import checks_of
from tests.system.ranks import in_group

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

GROUPS = {
    "collectives": (4, (collectives_worker,)),
    "exchanges": (4, (residual_worker, exchange_worker, disagreement_worker, hook_worker, replicas_worker)),
    "priority and norms": (3, (schedule_worker,)),
}


@pytest.mark.parametrize("name", GROUPS)
def test_checks_between_ranks(name, start_ranks):
    world_size, workers = GROUPS[name]
    checks = [check for worker in workers for check in checks_of(worker)]
    start_ranks(in_group, *checks, world_size=world_size).wait(timeout_s=200)


def test_all_exchanges_over_a_hundred_steps(start_ranks):
    work = exchange_worker.replicas_stay_equal_and_no_gradient_is_lost
    start_ranks(in_group, work, world_size=4).wait(timeout_s=200)
