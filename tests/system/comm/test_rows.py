"""Row-sparse gradients of replicated tables, and encoded embedding exchanges, between two ranks."""

from functools import partial

import pytest

from tests.system.comm import rows_worker as worker
from tests.system.comm.common import checks_of
from tests.system.ranks import in_group
from tests.system.sharding import wire_worker
from tests.system.sharding.wire_worker import Case

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

UNEVEN = (5, 8)


def test_rows_and_codecs_between_ranks(start_ranks):
    """One start, as that takes longer than all of it."""
    work = checks_of(worker)
    roundings = [("fp16", "fp32"), ("bf16", "fp32"), ("int8", "fp32"), ("int8", "bf16"), ("bf16", "bf16")]
    cases = [
        Case("dlrm", "torchrec", UNEVEN, exchange_dtype=exchange_dtype, precision=precision)
        for exchange_dtype, precision in roundings[:-1]
    ]
    cases += [
        Case("deepfm", "torchrec", UNEVEN, exchange_dtype="int8"),  # with narrow tables
        Case("dlrm", "auto", UNEVEN, chosen="exchange", exchange_dtype="int8"),
    ]
    work += [partial(wire_worker.check, case) for case in cases]
    # replicated are tables of up to 200 rows; of up to 2500, and one rank has no table of its own
    work += [partial(worker.a_step_stays_near, *rounding) for rounding in roundings]
    work += [partial(worker.a_step_stays_near, "int8", precision, 2500) for precision in ("fp32", "bf16")]
    start_ranks(in_group, *work, world_size=2).wait(timeout_s=100)
