"""Models that TorchRec users saved with `torch.distributed.checkpoint` continue here, on fewer ranks."""

import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.cli.checkpoints import IMPORT_LINES
from tests.cpr.shards import models

ROWS = {"a": 40, "b": 30, "c": 20, "d": 10, "e": 11}
SAVED_LAYOUT = {"a": "tw", "b": "cw", "c": "dp", "d": "tw_last", "e": "rw"}


def save_with_dcp(folder):
    """Trains and saves as TorchRec users do, without a line of this project."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = models.shard(SAVED_LAYOUT, ebc=models.bags(**ROWS))
    for step in range(3):
        model({"ebc": models.batch(step, 8, **ROWS)}).square().mean().backward()
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict(), "epoch": 2},
        checkpoint_id=folder,
    )
    dist.destroy_process_group()


LAYOUT = {"a": "tw", "b": "cw", "c": "dp", "d": "tw", "e": "tw"}


@pytest.mark.system
@pytest.mark.timeout(150)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_lines_that_cpr_import_prints_load_a_model_of_two_ranks(start_ranks, tmp_path, world_of_one):
    start_ranks(save_with_dcp, tmp_path / "dcp", world_size=2).wait(timeout_s=100)
    entries = FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    saved = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if hasattr(entry, "size")
    }
    dcp.load(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)

    config = CheckpointConfig(uri=str(tmp_path / "run"))
    model = models.shard(LAYOUT, ebc=models.bags(**ROWS))
    lines = IMPORT_LINES.replace("DCP_DIR", str(tmp_path / "dcp"))
    with Checkpointer(model, config) as checkpointer:
        exec(lines, {"torch": torch, "model": model, "checkpointer": checkpointer})
    again = models.shard(LAYOUT, ebc=models.bags(**ROWS))
    with Checkpointer(again, config) as checkpointer:
        checkpointer.load()
        for shard in checkpointer.shards:
            name = shard.table_fqn
            weights = saved[f"model.{name}.weight"]
            assert torch.equal(shard.weights, weights[:, slice(*shard.extent.cols)]), shard.name
            if not shard.replicated:
                sums = saved[f"optimizer.state.{name}.weight.{name[-1]}.momentum1"].view(-1, shard.num_rows)
                part = 0 if len(sums) == 1 else shard.col_offset // shard.num_cols
                assert torch.any(sums != 0)
                assert torch.equal(shard.optimizer_state["sum"], sums[part]), shard.name
    for name, tensor in again.module.dense.state_dict().items():
        assert torch.equal(tensor, saved[f"model.dense.{name}"]), name
