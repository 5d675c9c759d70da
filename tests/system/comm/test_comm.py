"""Collectives, exchanges, hooks and P3 between real ranks; one start of processes per test."""

from functools import partial

import pytest

from tests.system.comm import (
    collectives_worker,
    disagreement_worker,
    exchange_worker,
    hook_worker,
    replicas_worker,
    residual_worker,
    rows_worker,
    schedule_worker,
)
from tests.system.comm.common import checks_of
from tests.system.ranks import in_group
from tests.system.sharding import wire_worker
from tests.system.sharding.wire_worker import Case

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

UNEVEN_BATCHES = (5, 8)
WORKERS = {
    4: (
        collectives_worker,
        residual_worker,
        exchange_worker,
        disagreement_worker,
        hook_worker,
        replicas_worker,
    ),
    3: (schedule_worker,),
}


@pytest.mark.parametrize("world_size", WORKERS)
def test_checks_between_ranks(world_size, start_ranks):
    checks = [check for worker in WORKERS[world_size] for check in checks_of(worker)]
    start_ranks(in_group, *checks, world_size=world_size).wait(timeout_s=280)


def test_rows_and_codecs_between_ranks(start_ranks):
    """Row-sparse gradients of replicated tables, and encoded embedding exchanges; one start for all."""
    work = checks_of(rows_worker)
    roundings = [("fp16", "fp32"), ("bf16", "fp32"), ("int8", "fp32"), ("int8", "bf16"), ("bf16", "bf16")]
    cases = [
        Case("dlrm", "torchrec", UNEVEN_BATCHES, exchange_dtype=exchange_dtype, precision=precision)
        for exchange_dtype, precision in roundings[:-1]
    ]
    cases += [
        Case("deepfm", "torchrec", UNEVEN_BATCHES, exchange_dtype="int8"),  # with narrow tables
        Case("dlrm", "auto", UNEVEN_BATCHES, chosen="exchange", exchange_dtype="int8"),
    ]
    work += [partial(wire_worker.check, case) for case in cases]
    # replicated are tables of up to 200 rows; of up to 2500, and one rank has no table of its own
    work += [partial(rows_worker.a_step_stays_near, *rounding) for rounding in roundings]
    work += [
        partial(rows_worker.a_step_stays_near, "int8", precision, 2500) for precision in ("fp32", "bf16")
    ]
    start_ranks(in_group, *work, world_size=2).wait(timeout_s=100)
