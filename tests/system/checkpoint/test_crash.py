"""A process that saves is killed in the middle of everything; the newest complete state is always there."""

import json

import pytest
import torch
import torch.distributed as dist

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from tests.cpr.shards.models import shard
from tests.system.checkpoint.crash_worker import KILLS_OF_A_KIND, LAYOUT, ROWS, SCRIPT, bags


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def expected(step):
    """Row values of table `a` after the saves up to `step`."""
    values = torch.zeros(ROWS["a"])
    for number, kind in enumerate(SCRIPT[:step], 1):
        if kind == "base":
            values[:] = number
        else:
            values[[1, number]] = float(number)
    return values


@pytest.mark.system
@pytest.mark.timeout(240)
def test_wish_6_killed_at_any_moment_the_newest_complete_state_loads(start, tmp_path, world_of_one):
    process = start("-m", "tests.system.checkpoint.crash_worker", tmp_path, forks=True)
    _, output = process.communicate(timeout=200)
    assert process.returncode == 0, output[-4000:]
    touched = json.loads((tmp_path / "moments.json").read_text())
    kinds = {what for what, _, _ in touched}
    assert kinds == {"create", "write", "created", "delete", "deleted", "replace", "replaced"}

    folders = sorted(tmp_path.glob("killed-*/"), key=lambda path: int(path.name.split("-")[1]))
    assert len(folders) == KILLS_OF_A_KIND * len(kinds)
    model = shard(LAYOUT, ebc=bags(**ROWS))
    fell_short = 0
    for folder in folders:
        log = tmp_path / f"{folder.name}.log"
        num_reported = len(log.read_text().splitlines()) if log.exists() else 0
        with Checkpointer(model, CheckpointConfig(uri=str(folder), merge_after=0)) as checkpointer:
            loaded = checkpointer.load()
            if loaded is None:
                assert num_reported == 0, f"{folder.name}: save {num_reported} was committed, and is gone"
                continue
            step = loaded.state.step
            assert step in {num_reported, num_reported + 1}, (
                f"{folder.name}: {num_reported} were committed, {step} came back"
            )
            assert not [each for each in loaded.rejected if not each.unfinished]
            fell_short += step == num_reported
            weights = checkpointer.shards[0].weights
            assert torch.equal(weights, expected(step).unsqueeze(1).expand_as(weights)), folder.name
            checkpointer.save("consistent")  # training continues from there
            checkpointer.wait()
    assert fell_short, "no kill came before a commit"
