"""What TorchRec users have saved with `torch.distributed.checkpoint` goes on here, on fewer ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.cli.main import entry
from tests.cpr.shards import models
from tests.system.checkpoint import import_worker

ROWS = {"a": 40, "b": 30, "c": 20, "d": 10, "e": 11}
PREFIX = "ebc.embedding_bags"


@pytest.fixture
def saved(start_ranks, tmp_path):
    """A directory that two ranks have saved, and its tensors."""
    start_ranks(import_worker.main, tmp_path / "dcp", world_size=2).wait(timeout_s=100)
    entries = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "size")
    }
    dcp.load(tensors, checkpoint_id=tmp_path / "dcp", no_dist=True)
    return tmp_path / "dcp", tensors


@pytest.fixture
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.system
@pytest.mark.timeout(150)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_torchrec_model_goes_on_here(saved, tmp_path, world_of_one, capsys):
    folder, tensors = saved
    assert entry(["import", str(folder), "--out", str(tmp_path / "run"), "--step", "3"]) == 0
    assert "left out" not in capsys.readouterr().out
    model = models.shard({**dict.fromkeys(ROWS, "tw"), "c": "dp"}, ebc=models.bags(**ROWS))
    with Checkpointer(model, CheckpointConfig(uri=str(tmp_path / "run"))) as checkpointer:
        loaded = checkpointer.load()
        assert loaded.rejected == ()
        assert checkpointer.steps_done == 3
        shards = {shard.table_fqn.removeprefix(f"{PREFIX}."): shard for shard in checkpointer.shards}
        assert shards.keys() == ROWS.keys()
        for name, shard in shards.items():
            assert torch.equal(shard.weights, tensors[f"model.{PREFIX}.{name}.weight"])
        for name in ("a", "d", "e"):
            state = tensors[f"optimizer.state.{PREFIX}.{name}.weight.{name}.momentum1"]
            assert torch.any(state != 0)
            assert torch.equal(shards[name].optimizer_state["sum"], state)
        halves = tensors[f"optimizer.state.{PREFIX}.b.weight.b.momentum1"].view(2, 30)
        assert torch.any(halves[0] != halves[1])
        torch.testing.assert_close(shards["b"].optimizer_state["sum"], halves.mean(0))
        dense = dict(model.module.dense.state_dict())
        assert dense
        for name, tensor in dense.items():
            assert torch.equal(tensor, tensors[f"model.dense.{name}"])
