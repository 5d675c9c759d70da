"""Optimizers and the learning rate: fused in the tables, ordinary for the rest, one schedule for all."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from cpr.shards import table_groups
from dlrm.config.schema import LARGE_BATCH_OPTIMIZERS, DenseConfig, ScheduleConfig, TablesConfig
from dlrm.optim import LAMB, LARS
from dlrm.optim.norms import Norms, choose_norms, clip_gradients, local_norms
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting.operator_tables import OperatorTables

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


class ReplicatedTables:
    """The data-parallel tables of a model: TorchRec averages their gradients but leaves their update to us.

    They are small and many, so that neighbours of one width are updated as one tall table.

    Args:
        model: the sharded model.
        config: their optimizer, the same as that of all tables.
    """

    def __init__(self, model: nn.Module, config: TablesConfig) -> None:
        self._flat: list[tuple[nn.Parameter, Tensor, slice]] = []
        for group in table_groups(model):
            if isinstance(group.emb_module, DenseTableBatchedEmbeddingBagsCodegen):
                self._flat += _tall_tables(group.emb_module)
        self.optimizer: Optimizer | None = None
        if self._flat:
            options = {} if config.optimizer == "sgd" else {"eps": config.eps}
            self.optimizer = TABLE_CLASSES[config.optimizer](
                [tall for tall, _, _ in self._flat], lr=config.learning_rate, **options
            )

    def zero_grad(self) -> None:
        """Forget the gradients, in place: they are views of DistributedDataParallel's buckets."""
        for _, weights, _ in self._flat:
            if weights.grad is not None:
                weights.grad.zero_()

    def step(self) -> None:
        """Update all rows whose gradient is not zero."""
        if self.optimizer is None:
            return
        for tall, weights, place in self._flat:
            tall.grad = None if weights.grad is None else weights.grad[place].view_as(tall)
        self.optimizer.step()


def _tall_tables(tbe: DenseTableBatchedEmbeddingBagsCodegen) -> Iterator[tuple[nn.Parameter, Tensor, slice]]:
    """Neighbouring tables of one width as one parameter, with the flat weights and their place in them."""
    begin = 0
    for dim, tables in itertools.groupby(tbe.embedding_specs, key=lambda spec: spec[1]):
        end = begin + sum(rows for rows, _ in tables) * dim
        yield nn.Parameter(tbe.weights.detach()[begin:end].view(-1, dim)), tbe.weights, slice(begin, end)
        begin = end


class Optimizers:
    """All optimizers of a model under one schedule; all ranks make them, and step, together.

    Args:
        model: the sharded model.
        dense: optimizer of the dense parameters, also of those that are `OperatorTables`. Clipping, and the
            layers' rates of LARS and LAMB, are about the rest of them: tables have no part in it.
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
        self._operators = [
            module.tables.fused_optimizer for module in model.modules() if isinstance(module, OperatorTables)
        ]
        self._parameters, self._clip_norm = dense_parameters(model), dense.clip_norm
        asks = dense.clip_norm or dense.optimizer in LARGE_BATCH_OPTIMIZERS
        self._norms = choose_norms(self._parameters) if asks else local_norms
        self._dense = _dense_optimizer(self._parameters, dense, self._norms)
        self._dense_name = dense.optimizer
        self.step_dense: Callable[[], Any] = self._dense.step
        """Updates the dense parameters; whoever exchanges their gradients may do so in its stead."""
        self._replicated = ReplicatedTables(model, tables)
        self._options = [
            {name: value for name, value in group.items() if name != "params"} for group in self._groups
        ]
        self._factor = 1.0
        self._steps_before = 0  # of other runs, whose schedule this one goes on with

    @property
    def dense(self) -> Optimizer:
        """Of the dense parameters."""
        return self._dense

    @property
    def table_optimizers(self) -> list[Optimizer]:
        """Ordinary optimizers that hold state of table rows: those of the data-parallel tables."""
        return [] if self._replicated.optimizer is None else [self._replicated.optimizer]

    @property
    def learning_rates(self) -> dict[str, float]:
        """The current learning rates by name."""
        return {name: base * self._factor for name, base in self._base.items()}

    def begin_step(self, step: int) -> None:
        """Set the learning rates of `step` of this run, before its backward pass updates the tables."""
        factor = schedule_factor(self._schedule, self._steps_before + step)
        if factor != self._factor:
            self._set_factor(factor)
        self._dense.zero_grad()
        self._replicated.zero_grad()

    def step(self) -> None:
        """Update what the backward pass did not; dense gradients are averaged over the ranks by now."""
        if self._clip_norm:
            clip_gradients(self._parameters, self._clip_norm, self._norms)
        self.step_dense()
        self._replicated.step()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Of the ordinary optimizers, which bring options along when their states are loaded."""
        return [group for each in (self._dense, *self.table_optimizers) for group in each.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """State of the dense optimizer and of the schedule; the tables' state lives with their rows."""
        return {
            "optimizer": self._dense_name,
            "dense": self._dense.state_dict(),
            "factor": self._factor,
            "steps_before": self._steps_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there, with the options of the configuration; after states of `table_optimizers`.

        Raises:
            ValueError: it is the state of another optimizer.
        """
        name = state.get("optimizer", self._dense_name)  # older runs do not say
        if name != self._dense_name:
            raise ValueError(
                f"the run that goes on has dense.optimizer={name}, whose state is of no use to "
                f"{self._dense_name}: resume with dense.optimizer={name}, or begin a new run"
            )
        self._dense.load_state_dict(state["dense"])
        for group, options in zip(self._groups, self._options, strict=True):
            group.update(options)
        self._steps_before = state.get("steps_before", 0)  # older runs have none
        self._set_factor(state["factor"])

    def go_on_after(self, steps: int) -> float:
        """Go on with the schedule of another run, whose state was loaded; the factor of the first step.

        Args:
            steps: that the other run has done.

        Raises:
            ValueError: the schedule is over: nothing would be learned.
        """
        self._steps_before += steps
        factor = schedule_factor(self._schedule, self._steps_before)
        if factor == 0:
            raise ValueError(
                f"the learning rates' schedule has come to 0 after {self._steps_before:,} steps, and a "
                "warm start goes on with it: set schedule.decay_steps to 0 (no decay), or to more"
            )
        return factor

    def _set_factor(self, factor: float) -> None:
        self._factor = factor
        self._set(self._dense, "dense")
        if self._replicated.optimizer is not None:
            self._set(self._replicated.optimizer, "tables")
        self._set(self._fused, "tables")
        for optimizer in self._operators:  # which are among the fused ones
            self._set(optimizer, "dense")
        self._fused.step()  # hands FBGEMM the learning rate; rows are updated in the backward pass

    def _set(self, optimizer: Optimizer, name: str) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._base[name] * self._factor


def _dense_optimizer(parameters: Sequence[nn.Parameter], dense: DenseConfig, norms: Norms) -> Optimizer:
    rate, decay = dense.learning_rate, dense.weight_decay
    if dense.optimizer == "lars":
        trust = dense.trust_coefficient
        return LARS(parameters, lr=rate, weight_decay=decay, trust_coefficient=trust, norms=norms)
    if dense.optimizer == "lamb":
        return LAMB(parameters, lr=rate, weight_decay=decay, norms=norms)
    # not every supported torch has a fused Adagrad for CUDA
    fused = dense.optimizer != "adagrad" or parameters[0].device.type == "cpu"
    return DENSE_CLASSES[dense.optimizer](parameters, lr=rate, fused=fused)


def arithmetic_dtype(precision: str) -> torch.dtype:
    """The dtype behind `train.precision`."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
