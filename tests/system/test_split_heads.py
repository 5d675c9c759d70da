"""What works on tables works on those of split heads, to surviving the death of all workers."""

import uuid

import pytest
import torch

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

WORKER = ("-m", "tests.system.prepared", "tests.system.split_heads_worker")


def test_state_checkpoints_priority_and_recovery(start, launcher, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    environment = {
        "CPR_RESIDENT_ROOT": str(memory),
        "CPR_LAUNCH": uuid.uuid4().hex,
        "CPR_LAUNCH_PID": str(launcher),
    }
    process = start(*WORKER, tmp_path, ranks=2, restarts=1, environment=environment, forks=True)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said
    for rank in range(2):
        alive, found = (torch.load(tmp_path / f"{name}-{rank}.pt") for name in ("alive", "begin-1"))
        assert found["samples"] == alive["samples"]
        for mine, other in zip(found["shards"], alive["shards"], strict=True):
            assert (mine["table"], mine["at"]) == (other["table"], other["at"])
            assert mine["columns"].keys() == other["columns"].keys()
            for name, column in mine["columns"].items():
                assert torch.equal(column, other["columns"][name]), (mine["table"], name)
