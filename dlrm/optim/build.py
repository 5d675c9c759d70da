"""All optimizers of a model under one learning rate schedule: fused ones of the tables and dense ones."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torchrec.distributed.model_parallel import DistributedModelParallel

from cpr.shards import table_groups
from dlrm.config.schema import (
    LARGE_BATCH_OPTIMIZERS,
    CompensationName,
    DenseConfig,
    ScheduleConfig,
    TablesConfig,
)
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.optim import LAMB, LARS
from dlrm.optim.delay import Compensation, forget_weights_before
from dlrm.optim.norms import Norms, choose_norms, clip_gradients, local_norms
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting.operator_tables import OperatorTables


def schedule_factor(config: ScheduleConfig, step: int) -> float:
    """Compute the factor on the base learning rates at `step`, counted from 0."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay_steps == 0 or step < config.decay_start_step:
        return 1.0
    progress = min(1.0, (step - config.decay_start_step) / config.decay_steps)
    return float((1.0 - progress) ** config.power)


class ReplicatedTables:
    """The optimizer of a model's data-parallel tables, whose gradients TorchRec only averages.

    These tables are small and many, so that neighbours of one width are updated as a single tall table.

    Args:
        model: the sharded model.
        config: optimizer of all tables.
    """

    def __init__(self, model: nn.Module, config: TablesConfig) -> None:
        self._flat: list[tuple[nn.Parameter, Tensor, slice]] = []
        for group in table_groups(model):
            if isinstance(group.emb_module, DenseTableBatchedEmbeddingBagsCodegen):
                self._flat += _tall_tables(group.emb_module)
        self.optimizer: Optimizer | None = None
        if self._flat:
            known = TABLE_OPTIMIZERS[config.optimizer]
            options = {name: getattr(config, name) for name in known.options}
            parameters = [tall for tall, _, _ in self._flat]
            self.optimizer = known.make(parameters, lr=config.learning_rate, **options)

    def zero_grad(self) -> None:
        """Set gradients to zero in place, as they are views of DistributedDataParallel's buckets."""
        for _, weights, _ in self._flat:
            if weights.grad is not None:
                weights.grad.zero_()

    def step(self) -> None:
        """Update all rows that have a gradient."""
        if self.optimizer is None:
            return
        for tall, weights, place in self._flat:
            tall.grad = None if weights.grad is None else weights.grad[place].view_as(tall)
        self.optimizer.step()


def _tall_tables(tbe: DenseTableBatchedEmbeddingBagsCodegen) -> Iterator[tuple[nn.Parameter, Tensor, slice]]:
    """Yield a parameter for neighbouring tables of one width, the flat weights, and its slice of them."""
    begin = 0
    for dim, tables in itertools.groupby(tbe.embedding_specs, key=lambda spec: spec[1]):
        end = begin + sum(rows for rows, _ in tables) * dim
        yield nn.Parameter(tbe.weights.detach()[begin:end].view(-1, dim)), tbe.weights, slice(begin, end)
        begin = end


class Optimizers:
    """All optimizers of a model under one schedule; all ranks construct them, and step, together.

    Args:
        model: the sharded model.
        dense: optimizer of the dense parameters and of `OperatorTables`. Clipping and the layer rates of LARS
            and LAMB apply to the dense parameters alone.
        tables: optimizer of the tables, replicated ones included.
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
        self.dense = _dense_optimizer(self._parameters, dense, self._norms)
        """The optimizer of the dense parameters."""
        self._dense_name = dense.optimizer
        self.step_dense: Callable[[], Any] = self.dense.step
        """Updates the dense parameters; a priority exchange replaces it by its own step."""
        self._compensation: Compensation | None = None
        self._replicated = ReplicatedTables(model, tables)
        self._options = [
            {name: value for name, value in group.items() if name != "params"} for group in self._groups
        ]
        self._factor = 1.0
        self._is_set = True  # whether all optimizers have the learning rates of `_factor`
        self._steps_before = 0  # of other runs whose schedule this one continues

    @property
    def table_optimizers(self) -> list[Optimizer]:
        """PyTorch optimizers with state of table rows: those of the data-parallel tables."""
        return [] if self._replicated.optimizer is None else [self._replicated.optimizer]

    @property
    def learning_rates(self) -> dict[str, float]:
        """The current learning rates by name."""
        return {name: base * self._factor for name, base in self._base.items()}

    def compensate(self, kind: CompensationName, delay_steps: int) -> None:
        """Compensate from now on for dense gradients that are `delay_steps` late, which only SGD can."""
        if kind != "none":
            assert isinstance(self.dense, SGD), "the configuration refuses other optimizers"
            self._compensation = Compensation(self.dense, kind, delay_steps)

    def begin_step(self, step: int) -> None:
        """Zero gradients and set the learning rates of `step`, before the backward pass updates tables.

        If weights are predicted, the dense parameters are the predicted ones until they are updated.
        """
        factor = schedule_factor(self._schedule, self._steps_before + step)
        if factor != self._factor or not self._is_set:
            self._set_factor(factor)
        self.dense.zero_grad()
        self._replicated.zero_grad()
        if self._compensation is not None:
            self._compensation.predict()

    def step(self) -> None:
        """Update dense parameters and replicated tables, once dense gradients are averaged over the ranks."""
        if self._clip_norm:
            clip_gradients(self._parameters, self._clip_norm, self._norms)
        self.step_dense()
        self._replicated.step()

    @property
    def _groups(self) -> list[dict[str, Any]]:
        """Groups of the PyTorch optimizers, whose options are overwritten when states are loaded."""
        return [group for each in (self.dense, *self.table_optimizers) for group in each.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """State of the dense optimizer and the schedule; the tables' state is saved with their rows."""
        return {
            "optimizer": self._dense_name,
            "dense": self.dense.state_dict(),
            "factor": self._factor,
            "steps_before": self._steps_before,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state, but keep the configured options; call it after `table_optimizers` are loaded.

        Raises:
            ValueError: the state belongs to another optimizer.
        """
        self.load_except(state, ())

    def load_except(self, state: dict[str, Any], fresh: Sequence[Tensor]) -> None:
        """`load_state_dict`, but for the state of dense parameters that are `fresh` tensors of the model."""
        name = state.get("optimizer", self._dense_name)  # absent in states of older runs
        if name != self._dense_name:
            raise ValueError(
                f"the saved run has dense.optimizer={name}, whose state {self._dense_name} cannot use: "
                f"resume with dense.optimizer={name}, or start a new run"
            )
        _load_except(self.dense, state["dense"], {each.data_ptr() for each in fresh})
        if self._compensation is None or not self._compensation.from_weights:
            forget_weights_before(self.dense)
        for group, options in zip(self._groups, self._options, strict=True):
            group.update(options)
        self._steps_before = state.get("steps_before", 0)  # absent in states of older runs
        self._set_factor(state["factor"])
        self._is_set = False  # tables, which are loaded after this, bring the learning rate of their save

    def continue_schedule(self, steps: int) -> float:
        """Continue the schedule of another run, whose state was loaded, and return the first step's factor.

        Args:
            steps: done by the other run.

        Raises:
            ValueError: the learning rates have reached 0.
        """
        self._steps_before += steps
        factor = schedule_factor(self._schedule, self._steps_before)
        if factor == 0:
            raise ValueError(
                f"the learning rates' schedule has reached 0 after {self._steps_before:,} steps, and a warm "
                "start continues it: set schedule.decay_steps to 0 (no decay), or to more"
            )
        return factor

    def _set_factor(self, factor: float) -> None:
        self._factor, self._is_set = factor, True
        self._set(self.dense, "dense")
        if self._replicated.optimizer is not None:
            self._set(self._replicated.optimizer, "tables")
        self._set(self._fused, "tables")
        for optimizer in self._operators:  # among the fused ones, but with the dense rate
            self._set(optimizer, "dense")
        self._fused.step()  # passes the learning rate to FBGEMM; rows are updated in the backward pass

    def _set(self, optimizer: Optimizer, name: str) -> None:
        for group in optimizer.param_groups:
            group["lr"] = self._base[name] * self._factor


def _load_except(optimizer: Optimizer, saved: Any, fresh: Collection[int]) -> None:
    """Load a state, but for the parameters at `fresh` addresses."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    kept = {each: dict(optimizer.state.get(each, {})) for each in parameters if each.data_ptr() in fresh}
    optimizer.load_state_dict(saved)
    optimizer.state.update(kept)


def _dense_optimizer(parameters: Sequence[nn.Parameter], dense: DenseConfig, norms: Norms) -> Optimizer:
    rate, decay = dense.learning_rate, dense.weight_decay
    if dense.optimizer == "lars":
        trust = dense.trust_coefficient
        return LARS(parameters, lr=rate, weight_decay=decay, trust_coefficient=trust, norms=norms)
    if dense.optimizer == "lamb":
        return LAMB(parameters, lr=rate, weight_decay=decay, norms=norms)
    if dense.momentum:  # fused, it fails where some parameters have a velocity and others not yet
        return SGD(parameters, lr=rate, momentum=dense.momentum, foreach=True)
    # not every supported torch has a fused Adagrad for CUDA; there it loops over parameters unless told
    is_fused = dense.optimizer != "adagrad" or parameters[0].device.type == "cpu"
    way = {"fused": True} if is_fused else {"foreach": True}
    made: Optimizer = TABLE_OPTIMIZERS[dense.optimizer].make(parameters, lr=rate, **way)
    return made


def arithmetic_dtype(precision: str) -> torch.dtype:
    """Convert `train.precision` to a dtype."""
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
