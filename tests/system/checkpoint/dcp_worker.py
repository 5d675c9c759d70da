"""A rank of `test_from_dcp`: trains and saves as TorchRec users do, without a line of this project."""

import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.cpr.shards import models

ROWS = {"a": 40, "b": 30, "c": 20, "d": 10, "e": 11}
LAYOUT = {"a": "tw", "b": "cw", "c": "dp", "d": "tw_last", "e": "rw"}


def main(folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = models.shard(LAYOUT, ebc=models.bags(**ROWS))
    for step in range(3):
        model({"ebc": models.batch(step, 8, **ROWS)}).square().mean().backward()
    dcp.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict(), "epoch": 2},
        checkpoint_id=folder,
    )
    dist.destroy_process_group()
