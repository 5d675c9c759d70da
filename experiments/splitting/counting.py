"""Counts the bytes that each rank sends in a step, in the workers of `experiments.splitting`."""

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.launch.device import Ranks
from dlrm.models.fm import LinearHead
from dlrm.sharding.splitting.planning.shapes import heads_of
from dlrm.sharding.splitting.wire import Wire, counted
from experiments.harness.training import Training
from experiments.splitting.workload import BAGS, Ids, Workload


def count(model: str, workload: Workload, ranks: Ranks) -> dict[str, Any]:
    """Bytes of every rank in rank order, by plan; for a parameter server by kind of bags.

    Args:
        model: one of `experiments.splitting.workload.MODELS`.
        workload: batches and tables.
        ranks: this process and the others.
    """
    dims = table_dims(model, workload)
    return {
        "torchrec": _of_all(_step_bytes(model, "torchrec", workload, ranks)),
        "des": _of_all(_step_bytes(model, "des", workload, ranks)),
        "pull_and_push": {
            bags: _of_all(_mean_pull_and_push_bytes(workload, bags, ranks, dims)) for bags in BAGS
        },
    }


def table_dims(model: str, workload: Workload) -> list[int]:
    """Numbers in a table row for each head of a model; 1 for a linear part, of which one weight counts."""
    heads = heads_of(workload.unsharded(model)).values()
    return [
        1 if isinstance(head, LinearHead) else head.tables.embedding_bag_configs()[0].embedding_dim
        for head in heads
    ]


def _of_all(own: float) -> list[float]:
    held = [0.0] * dist.get_world_size()
    dist.all_gather_object(held, own)
    return held


def _step_bytes(model: str, strategy: str, workload: Workload, ranks: Ranks) -> float:
    """Bytes of embeddings, partial results and gradients in a step without replicated tables."""
    config = workload.config(model, strategy, "sharding.data_parallel_rows=0")
    training = Training(workload.inputs(config, ranks), cycle(workload.batches(ranks)))
    training.step()  # opens connections and allocates buffers
    with counted() as wire:
        training.step()
    return wire.value_bytes


def _mean_pull_and_push_bytes(workload: Workload, bags: str, ranks: Ranks, dims: Sequence[int]) -> float:
    with counted() as wire:
        for number in range(workload.num_batches):
            for keys in workload.keys(number, bags, ranks):
                for dim in dims:
                    _pull_and_push(keys, dim, ranks.world_size)
    return _all_bytes(wire) / workload.num_batches


def _all_bytes(wire: Wire) -> float:
    return wire.value_bytes + wire.id_bytes


def _pull_and_push(keys: Ids, dim: int, num_ranks: int) -> None:
    """Simulate a step with a parameter server for one table, with row `key` on rank `key % N`."""
    wanted = torch.from_numpy(keys[np.argsort(keys % num_ranks, kind="stable")])
    asked = np.bincount(keys % num_ranks, minlength=num_ranks).tolist()
    of_others: list[list[int]] = [[] for _ in range(num_ranks)]
    dist.all_gather_object(of_others, asked)
    served = [each[dist.get_rank()] for each in of_others]
    _exchange(wanted, asked, served)
    pulled = _exchange(torch.zeros(sum(served), dim), served, asked)
    _exchange(pulled, asked, served)  # gradients, as large as the rows; the keys need no second exchange


def _exchange(sent: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
    received = sent.new_empty(sum(from_each), *sent.shape[1:])
    dist.all_to_all_single(received, sent, from_each, to_each)
    return received
