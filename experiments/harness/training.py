"""The trainer's model and optimizers, driven step by step by experiments that act between steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Final

import torch
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel

from data.batch import Batch
from dlrm.dense_sync import AllReduceSync
from dlrm.dense_sync.base import DenseSync
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.build import shard
from dlrm.training.data import Inputs

NUM_SCALARS: Final = 1  # averaged together with the gradients: a flag of each rank

MakeSynchronizer = Callable[[DistributedModelParallel, Optimizers], DenseSync]


def average_gradients(model: DistributedModelParallel, optimizers: Optimizers) -> DenseSync:
    """Synchronize by one fp32 all-reduce of all dense gradients in each step."""
    return AllReduceSync(dense_parameters(model), NUM_SCALARS)


class Training:
    """Training on the CPU under an open process group.

    Args:
        inputs: configuration, data and ranks of the training.
        batches: for the next steps; may be replaced between steps.
        initialize: whether to initialize the tables, see `dlrm.training.build.shard`.
        folder: where `sharding.strategy = "auto"` stores its choice.
        synchronize: makes the synchronizer of dense parameters.
    """

    def __init__(
        self,
        inputs: Inputs,
        batches: Iterator[Batch],
        initialize: bool = True,
        folder: Path | None = None,
        synchronize: MakeSynchronizer = average_gradients,
    ) -> None:
        config = inputs.config
        self.model = shard(inputs, initialize, folder)
        self.optimizers = Optimizers(self.model, config.dense, config.tables, config.schedule)
        self.batches = batches
        self.steps_done = 0
        self.synchronizer = synchronize(self.model, self.optimizers)
        self._world_size = inputs.ranks.world_size

    def step(self, flag: bool = False) -> bool:
        """Make one step on all ranks; returns whether `flag` was set on every rank."""
        batch, began = next(self.batches), perf_counter()
        self.optimizers.begin_step(self.steps_done)
        logits = self.model(batch.dense, batch.sparse)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        share = float(self.synchronizer.average(torch.tensor([float(flag)])))
        self.optimizers.step()
        self.synchronizer.updated(perf_counter() - began)
        self.steps_done += 1
        return share * self._world_size > self._world_size - 0.5

    def timed_steps(self, num: int) -> list[float]:
        """Make `num` steps and return the seconds of each."""
        took_s = []
        for _ in range(num):
            began = perf_counter()
            self.step()
            took_s.append(perf_counter() - began)
        return took_s
