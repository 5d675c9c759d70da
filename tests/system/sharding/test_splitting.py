"""Split heads train exactly like the same heads in one process."""

from functools import partial

import pytest

from tests.system.ranks import in_group
from tests.system.sharding import exchange_worker, splitting_worker
from tests.system.sharding.splitting_worker import HEADS, Case

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

UNEVEN = {1: (5,), 2: (8, 3), 3: (8, 0, 6), 4: (8, 8, 8, 2)}


def work_of(world_size):
    """Cases for so many ranks."""
    cases = [
        Case(head, optimizer, multi_hot, sizes)
        for head in HEADS
        for optimizer, multi_hot, sizes in (("sgd", False, ()), ("adagrad", True, UNEVEN[world_size]))
    ]
    cases += [
        Case(head, "adagrad", True, UNEVEN[world_size], layout, host_lookups)
        for head in HEADS
        for layout, host_lookups in (("rows", False), ("rows", True), ("fewer", True))
    ]
    if world_size == 4:
        cases += [
            Case(head, "adagrad", True, UNEVEN[world_size], ranks_per_node=2) for head in ("dot", "deepfm")
        ]
    return [partial(splitting_worker.check, case) for case in cases]


def test_steps_on_one_rank_equal_one_process(world_of_one):
    for check in work_of(1):
        check()


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_steps_equal_one_process_and_exchanges_plain_autograd(world_size, start_ranks):
    work = work_of(world_size)
    if world_size == len(exchange_worker.SIZES):
        work.append(exchange_worker.check)  # here, as starting ranks takes long
    start_ranks(in_group, *work, world_size=world_size).wait(timeout_s=150)
