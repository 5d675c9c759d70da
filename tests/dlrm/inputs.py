"""Inputs of a run without data, for tests that build models from a configuration."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from dlrm.launch.device import Ranks


def fake_inputs(config, features, batch_size=16, ids=None, num_dense=13):
    """What `dlrm.training.model` reads of `Inputs`, for this rank; `ids` is the mean number by feature."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return SimpleNamespace(
        config=config,
        ranks=Ranks(rank=rank, local_rank=rank, world_size=world_size),
        device=torch.device("cpu"),
        manifest=SimpleNamespace(features=tuple(features), dense=("dense",) * num_dense),
        loader=SimpleNamespace(config=SimpleNamespace(batch_size=batch_size)),
        ids=ids or {},
    )
