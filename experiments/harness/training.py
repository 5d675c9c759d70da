"""The trainer's model and optimizers, driven step by step by experiments that act between steps."""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from data.batch import Batch
from dlrm.dense_sync.base import DenseSync
from dlrm.optim.build import Optimizers
from dlrm.pipeline.build import make_schedule
from dlrm.training.build import make_dense_sync, shard
from dlrm.training.data import Inputs
from dlrm.training.trainer import NUM_SCALARS

MakeSynchronizer = Callable[[DistributedModelParallel, Optimizers], DenseSync]


class Training:
    """Training on the CPU under an open process group.

    Args:
        inputs: configuration, data and ranks of the training.
        batches: for the next steps; may be replaced between steps of a schedule that does not look ahead.
        initialize: whether to initialize the tables, see `dlrm.training.build.shard`.
        folder: where `sharding.strategy = "auto"` stores its choice.
        synchronize: makes the synchronizer of dense parameters; None: that of the configuration.
    """

    def __init__(
        self,
        inputs: Inputs,
        batches: Iterator[Batch],
        initialize: bool = True,
        folder: Path | None = None,
        synchronize: MakeSynchronizer | None = None,
    ) -> None:
        config = inputs.config
        self.model = shard(inputs, initialize, folder)
        self.optimizers = Optimizers(self.model, config.dense, config.tables, config.schedule)
        self.batches = batches
        self.steps_done = 0
        self.schedule = make_schedule(config.train, self.model)
        self._ahead: deque[Batch] = deque()
        synchronize = synchronize or partial(make_dense_sync, config)
        self.synchronizer = synchronize(self.model, self.optimizers)
        self._world_size = inputs.ranks.world_size

    def step(self, flag: bool = False) -> bool:
        """Make one step on all ranks; returns whether `flag` was set on every rank."""
        batch, began = self._ahead.popleft() if self._ahead else next(self.batches), perf_counter()
        self.optimizers.begin_step(self.steps_done)
        self.schedule.step(batch, self._upcoming)
        share = float(self.synchronizer.average(torch.full((NUM_SCALARS,), float(flag)))[0])
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

    def _upcoming(self, count: int) -> list[Batch]:
        self._ahead += islice(self.batches, max(0, count - len(self._ahead)))
        return list(islice(self._ahead, count))
