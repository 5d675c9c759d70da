"""Tables of split heads survive the death of workers and the loss of memory."""

import uuid

import pytest
import torch

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

WORKER = ("-m", "tests.system.prepared", "tests.system.sharding.split_heads_worker")


def assert_shards(found, expected):
    """Bit for bit, weights and optimizer state."""
    for mine, other in zip(found["shards"], expected["shards"], strict=True):
        assert (mine["table"], mine["at"]) == (other["table"], other["at"])
        assert mine["columns"].keys() == other["columns"].keys()
        for name, column in mine["columns"].items():
            assert torch.equal(column, other["columns"][name]), (mine["table"], name)


def test_split_heads_support_state_checkpoints_priority_and_recovery(start, launcher, tmp_path):
    memory = tmp_path / "memory"
    memory.mkdir()
    environment = {
        "CPR_RESIDENT_ROOT": str(memory),
        "CPR_LAUNCH": uuid.uuid4().hex,
        "CPR_LAUNCH_PID": str(launcher),
    }
    process = start(*WORKER, tmp_path, ranks=2, restarts=2, environment=environment, forks=True)
    _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said

    def load(name):
        return torch.load(tmp_path / f"{name}.pt")

    for rank in range(2):
        alive, found = load(f"alive-0-{rank}"), load(f"begin-1-{rank}")
        assert found["samples"] == alive["samples"]
        assert_shards(found, alive)
    # of one rank the memory is lost: its rows come from the checkpoint, those of operators among them
    alive, saved = load("alive-1-1"), load("saved-1")
    assert_shards(load("begin-2-0"), load("alive-1-0"))
    assert_shards(load("begin-2-1"), saved)
    assert load("begin-2-1")["samples"] == alive["samples"]
    lost = {
        live["table"]
        for live, old in zip(alive["shards"], saved["shards"], strict=True)
        if not torch.equal(live["columns"]["weights"], old["columns"]["weights"])
    }
    assert any("deep.tables" in table for table in lost)
    assert any("deep.first" in table for table in lost)
