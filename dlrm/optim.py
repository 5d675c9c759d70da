"""Optimizers and the learning rate: fused in the tables, ordinary for the rest, one schedule for all."""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm.config import DenseConfig, ScheduleConfig, TablesConfig

TABLE_CLASSES: Final[dict[str, Callable[..., Optimizer]]] = {
    "sgd": SGD,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
}
DENSE_CLASSES: Final[dict[str, Callable[..., Optimizer]]] = {"sgd": SGD, "adagrad": Adagrad, "adam": Adam}


def schedule_factor(config: ScheduleConfig, step: int) -> float:
    """Factor on the base learning rates at `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay_steps == 0 or step < config.decay_start_step:
        return 1.0
    progress = min(1.0, (step - config.decay_start_step) / config.decay_steps)
    return float((1.0 - progress) ** config.power)


def dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Parameters outside all tables."""
    return [parameter for name, parameter in model.named_parameters() if ".embedding_bags." not in name]


def replicated_tables(model: nn.Module) -> list[nn.Parameter]:
    """Data-parallel tables: TorchRec averages their gradients but leaves their update to us."""
    return [
        parameter
        for name, parameter in model.named_parameters()
        if ".embedding_bags." in name and not hasattr(parameter, "_in_backward_optimizers")
    ]


class Optimizers:
    """All optimizers of a model under one schedule.

    Args:
        model: the sharded model.
        dense: optimizer of the dense parameters.
        tables: optimizer of the tables, also of the replicated ones.
        schedule: of the learning rates.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        dense: DenseConfig,
        tables: TablesConfig,
        schedule: ScheduleConfig,
    ) -> None:
        self._schedule = schedule
        self._base = {"dense": dense.learning_rate, "tables": tables.learning_rate}
        self._fused = model.fused_optimizer
        self._dense = _dense_optimizer(dense_parameters(model), dense)
        self._replicated = _table_optimizer(replicated_tables(model), tables)
        self._factor = 1.0

    @property
    def learning_rates(self) -> dict[str, float]:
        """The current learning rates by name."""
        return {name: base * self._factor for name, base in self._base.items()}

    def begin_step(self, step: int) -> None:
        """Set the learning rates of `step`, before its backward pass updates the tables."""
        factor = schedule_factor(self._schedule, step)
        if factor != self._factor:
            self._factor = factor
            self._set(self._dense, "dense")
            if self._replicated is not None:
                self._set(self._replicated, "tables")
            self._set(self._fused, "tables")
            self._fused.step()  # hands FBGEMM the learning rate; rows are updated in the backward pass
        self._dense.zero_grad()
        if self._replicated is not None:
            self._replicated.zero_grad(set_to_none=False)  # views of DistributedDataParallel's buckets

    def step(self) -> None:
        """Update what the backward pass did not."""
        self._dense.step()
        if self._replicated is not None:
            self._replicated.step()

    def _set(self, optimizer: Optimizer, name: str) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._base[name] * self._factor


def _dense_optimizer(parameters: Sequence[nn.Parameter], dense: DenseConfig) -> Optimizer:
    # not every supported torch has a fused Adagrad for CUDA
    fused = dense.optimizer != "adagrad" or parameters[0].device.type == "cpu"
    return DENSE_CLASSES[dense.optimizer](parameters, lr=dense.learning_rate, fused=fused)


def _table_optimizer(parameters: Sequence[nn.Parameter], tables: TablesConfig) -> Optimizer | None:
    if not parameters:
        return None
    options = {} if tables.optimizer == "sgd" else {"eps": tables.eps}
    return TABLE_CLASSES[tables.optimizer](parameters, lr=tables.learning_rate, **options)


def arithmetic_dtype(precision: str) -> torch.dtype:
    """The dtype behind `train.precision`."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
