"""A step sends the bytes of the planner's formulas; links are measured by all ranks."""

from functools import partial

import pytest

from tests.system.ranks import in_group
from tests.system.sharding import wire_worker
from tests.system.sharding.wire_worker import Case

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

KINDS = ("lr", "fm", "deepfm", "dlrm", "dcnv2")


@pytest.mark.parametrize("sizes", [(6, 6), (8, 1, 5), (4, 4, 4, 4)], ids=["2", "3_uneven", "4"])
def test_bytes_of_a_step_and_speeds_of_links(sizes, start_ranks):
    cases = [Case(kind, strategy, sizes) for kind in KINDS for strategy in ("torchrec", "des")]
    cases += [
        Case("dlrm", "des", sizes, wire_dtype="bf16"),
        Case("dlrm", "torchrec", sizes, precision="bf16"),
        Case("deepfm", "des", sizes, precision="bf16"),
        Case("lr", "auto", sizes, chosen="rows"),
        Case("dlrm", "auto", sizes, chosen="rows", wire_dtype="bf16", small_rows=20),
        Case("dcnv2", "des", sizes, wire_dtype="bf16", small_rows=20),
    ]
    work = []
    if len(sizes) == 3:
        too_few = "8 columns make 2 pieces of 4 (an FBGEMM limit), too few for 3 ranks"
        cases.append(Case("dlrm", "des", sizes, dim=8, refusal=too_few))
    if len(sizes) == 4:
        work.append(wire_worker.measure_together)  # here, as starting ranks takes long
        cases += [Case(kind, "auto", sizes, chosen="two_level", ranks_per_node=2) for kind in KINDS]
    work += [partial(wire_worker.check, case) for case in cases]
    start_ranks(in_group, *work, world_size=len(sizes)).wait(timeout_s=150)
