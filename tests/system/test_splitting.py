"""Split heads train exactly like the same heads in one process."""

import pytest

from tests.system import exchange_worker, splitting_worker
from tests.system.splitting_heads import HEADS
from tests.system.splitting_worker import Case

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

UNEVEN = {1: (5,), 2: (8, 3), 3: (8, 0, 6), 4: (8, 8, 8, 2)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_twenty_steps_equal_one_process(world_size, start_ranks):
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
    start_ranks(splitting_worker.train, cases, world_size=world_size).wait(timeout_s=150)


def test_exchanges_equal_plain_autograd_and_are_rounded_once(start_ranks):
    start_ranks(exchange_worker.main, world_size=3).wait(timeout_s=60)
