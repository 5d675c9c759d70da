"""The trainer's model and optimizers, a step at a time: for experiments that do things between steps."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.distributed.model_parallel import DistributedModelParallel

from data.batch import Batch
from dlrm.dense_sync import AllReduceSync
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.build import shard
from dlrm.training.data import Inputs

NUM_SCALARS: Final = 1  # that travel with the gradients: a flag of each rank

Value = TypeVar("Value")


def of_rank_0(value: Value) -> Value:
    """What rank 0 has, which alone looks at the clock and at files; all ranks call it together."""
    held: list[Any] = [value]
    dist.broadcast_object_list(held)
    found: Value = held[0]
    return found


class Keeper(Protocol):
    """Keeps replicas of dense parameters alike; what `dlrm.dense_sync.DenseSync` says of these."""

    def average(self, scalars: Tensor) -> Tensor:
        """Between the backward pass and the update."""

    def updated(self, seconds: float) -> None:
        """After the update."""

    def join(self) -> None:
        """Before parameters are read."""


Keep = Callable[[DistributedModelParallel, Optimizers], Keeper]


def average_gradients(model: DistributedModelParallel, optimizers: Optimizers) -> Keeper:
    """All of them, in one fp32 all-reduce a step."""
    return AllReduceSync(dense_parameters(model), NUM_SCALARS)


class Training:
    """Training on the CPU under an open process group.

    Args:
        inputs: say what is trained.
        batches: what the next steps train on; may be replaced between steps.
        initialize: whether tables get initial values of our own, as in `dlrm.training.build.shard`.
        folder: where `sharding.strategy` auto writes down what it chose, as there.
        keep: makes what keeps replicas alike.
    """

    def __init__(
        self,
        inputs: Inputs,
        batches: Iterator[Batch],
        initialize: bool = True,
        folder: Path | None = None,
        keep: Keep = average_gradients,
    ) -> None:
        config = inputs.config
        self.model = shard(inputs, initialize, folder)
        self.optimizers = Optimizers(self.model, config.dense, config.tables, config.schedule)
        self.batches = batches
        self.steps_done = 0
        self.keeper = keep(self.model, self.optimizers)
        self._world_size = inputs.ranks.world_size

    def step(self, flag: bool = False) -> bool:
        """One step of all ranks; whether `flag` was set on every one of them."""
        batch, began = next(self.batches), perf_counter()
        self.optimizers.begin_step(self.steps_done)
        logits = self.model(batch.dense, batch.sparse)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        share = float(self.keeper.average(torch.tensor([float(flag)])))
        self.optimizers.step()
        self.keeper.updated(perf_counter() - began)
        self.steps_done += 1
        return share * self._world_size > self._world_size - 0.5

    def timed_steps(self, num: int) -> list[float]:
        """Seconds of each of `num` steps."""
        took_s = []
        for _ in range(num):
            began = perf_counter()
            self.step()
            took_s.append(perf_counter() - began)
        return took_s
