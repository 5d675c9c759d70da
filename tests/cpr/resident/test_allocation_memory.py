"""Tables that live in a segment take their memory once."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch.distributed as dist

from cpr.resident.allocation import allocate_tables
from cpr.resident.home import Home
from cpr.shards import find_shards
from tests.cpr.resident.shards import RUN, crash_and_find
from tests.cpr.resident.test_allocation import build_in
from tests.cpr.shards.models import DIM, bags, shard


def memory_bytes():
    status = Path("/proc/self/status").read_text()
    kinds = {
        line.split()[0]: int(line.split()[1]) * 1024 for line in status.splitlines() if line.endswith("kB")
    }
    return {name: kinds[f"{name}:"] for name in ("RssAnon", "RssFile", "RssShmem", "VmHWM", "VmRSS")}


@pytest.fixture
def shared_memory():
    """A root where memory counts as shared, not as pages of a disk's files."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs /dev/shm")
    with TemporaryDirectory(dir="/dev/shm", prefix="test-cpr-") as root:
        yield root


def grow(home, segment, adopt, **rows):
    """Bytes that tables took, or would take again: of anonymous memory, and at the peak."""
    before = memory_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts over
    with allocate_tables(segment, adopt) as allocation:
        model = shard({"t": "tw"}, bag=bags(**rows))
    after = memory_bytes()
    if not adopt:
        segment.seal(**RUN, shards=find_shards(model))
    return allocation, after["RssAnon"] - before["RssAnon"], after["VmHWM"] - before["VmRSS"]


def grow_twice(pipe, root):
    """What the first worker's tables take, and those of the next one that adopts them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    build_in(Home("warmup", root).create("rank0"))
    home = Home("run", root)
    segment = home.create("rank0")
    rows = 9_000_000  # its optimizer state is beyond what malloc keeps for later
    pipe.send(grow(home, segment, False, t=rows))
    pipe.send(grow(home, crash_and_find(home, segment), True, t=rows))


@pytest.mark.system
@pytest.mark.timeout(120)
def test_tables_take_memory_once_and_adopting_takes_none(shared_memory, start):
    # in a process of its own: malloc serves large tensors from what other tests have left free in the middle
    _, pipe = start(grow_twice, shared_memory)
    assert pipe.poll(60)
    allocation, anonymous, peak = pipe.recv()
    assert allocation.num_bytes >= 9_000_000 * (DIM + 1) * 4
    assert anonymous < 0.05 * allocation.num_bytes
    assert allocation.num_bytes / 2 < peak < 1.05 * allocation.num_bytes
    assert pipe.poll(60)
    allocation, _, peak = pipe.recv()
    assert allocation.adopted
    assert peak < 0.05 * allocation.num_bytes  # no page of the tables was touched
