"""Two ranks of which one alone leaves training by `sys.exit(0)`."""

import os
import sys
from datetime import timedelta

import pytest

import cpr
from tests.cpr.shards import models

ROWS = {"a": 100, "b": 40}
TIMEOUT = timedelta(seconds=3)


def main(folder):
    os.environ |= {"CPR_LAUNCH": folder.name, "LOCAL_WORLD_SIZE": "2"}
    memory = folder / "memory"
    memory.mkdir(exist_ok=True)
    recovery = cpr.PartialRecovery(str(folder / "checkpoint"), resident_root=str(memory))
    with pytest.raises(RuntimeError):  # of a collective in which the other rank is not
        train(recovery)
    assert recovery.memory_folder.is_dir(), "what nobody saved was freed"


def train(recovery):
    with recovery:
        recovery.init_process_group("gloo", TIMEOUT)
        with recovery.building():
            model = models.shard({"a": "rw", "b": "rw"}, ebc=models.bags(**ROWS))
        recovery.restore(model)
        for step in range(3):
            model({"ebc": models.batch(step, 8, **ROWS)}).square().mean().backward()
            recovery.step(samples=16)
        if recovery.worker_group.rank == 0:
            sys.exit(0)
        model({"ebc": models.batch(3, 8, **ROWS)})
