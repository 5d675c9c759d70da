"""A communication hook that sends the gradients of any `DistributedDataParallel` model through an exchange.

    model = DistributedDataParallel(model)
    hook = register(model, CommConfig(exchange="all_gather", ratio=0.01))
    ...
    checkpoint["hook"] = hook.state_dict()  # differs by rank

DDP passes gradients in buckets, and rebuilds these after the first step. The hook collects all buckets in one
vector, with a fixed slice for each parameter, and exchanges it after the last bucket. Residuals stay with
their parameters, the largest values are those of the whole gradient, and ranks may have different buckets;
but backward pass and exchange do not overlap.
"""

import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # public, but not in its __all__
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dlrm.comm.build import build_exchange
from dlrm.comm.config import CommConfig
from dlrm.comm.consistency import check_alike
from dlrm.comm.exchange import Exchange
from dlrm.comm.feedback import LostResiduals, StepCheck
from dlrm.comm.links import finish
from dlrm.comm.stats import ExchangeFigures


def register(model: DistributedDataParallel, config: CommConfig, *, mean: bool = True) -> "GradientHook":
    """Register an exchange as the hook of a DDP model; all ranks call it before the first backward pass.

    To accumulate gradients over several backward passes, run all but the last under `no_sync`. The step
    times that controllers and the tuner see last from exchange to exchange.

    A residual has the scale of its step's loss, which must not change. The first `torch.optim.Optimizer` that
    steps the model's parameters while a residual is pending raises a `RuntimeError` if an enabled
    `GradScaler` calls it (bf16 needs none), and rank 0 logs a warning if its momentum may diverge under
    `compressor="random"`. Losses that are scaled in other ways are not detected.

    Args:
        model: with fp32 parameters and no other hook.
        config: any exchange but `priority` and `selsync`, which do not sum whole gradients. `two_level` and
            `hi_topk` save bytes between nodes; on one node they send all values.
        mean: divide by the number of ranks, as DDP does. Without, if each rank's loss is scaled by its share
            of all samples, the sum is the gradient of the joined batch, however uneven batches are.

    Returns:
        The hook, whose state belongs into checkpoints.

    Raises:
        ValueError: the model is not wrapped in DDP; or, on all ranks, a parameter is not fp32, the exchange
            is one of those two, or ranks have different parameters or options.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"register takes a model wrapped in DistributedDataParallel, not a {type(model).__name__}: wrap "
            "it first, and call the wrapper in the training loop"
        )
    if not isinstance(config, CommConfig):
        raise ValueError(f"register takes a dlrm.comm.config.CommConfig, not {config!r}")
    hook = GradientHook(model, config, mean)
    model.register_comm_hook(hook, GradientHook.take)
    watch = register_optimizer_step_pre_hook(hook.check_step)
    weakref.finalize(model, watch.remove)  # the optimizer hook is global, and must not keep models alive
    return hook


class GradientHook:
    """The hook that `register` returns, with the same arguments."""

    def __init__(self, model: DistributedDataParallel, config: CommConfig, mean: bool) -> None:
        named = {
            name: parameter
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        }
        check_alike(named, model.process_group, options=(config, "mean" if mean else "sum"))
        _check_dtypes(named)
        device = next(iter(named.values())).device
        sizes = [parameter.numel() for parameter in named.values()]
        self._mean, self._keeps_views = mean, model.gradient_as_bucket_view
        self._may_be_unused = model.find_unused_parameters
        self.exchange: Exchange = build_exchange(config, sum(sizes), device, model.process_group)
        """Sums the gradients."""
        self._flat = self.exchange.make_buffer()
        self._sizes = sizes
        self._pieces = dict(zip(map(id, named.values()), self._split(self._flat), strict=True))
        warns = dist.get_rank(model.process_group) == 0
        self.check_step = StepCheck(config, self._pieces.keys(), self.exchange.residual, warns=warns)
        """Checks the optimizer before its step."""
        self._buckets: list[tuple[Tensor, list[tuple[Tensor, Tensor]], torch.futures.Future[Tensor]]] = []
        self._num_taken = 0
        self._began_s: float | None = None

    def take_figures(self) -> ExchangeFigures | None:
        """Return the figures since the last call; None if there was no exchange."""
        return self.exchange.take_figures()

    def state_dict(self) -> dict[str, Any]:
        """State of this rank, with live tensors."""
        return {"exchange": self.exchange.state_dict(), "residual": self.exchange.residual.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> LostResiduals | None:
        """Restore a state; all ranks call it together, each with its own.

        A rank whose own state is gone loads any other rank's, `{**state, "residual": None}`, without a
        residual. With fewer ranks than before, call `exchange.residual.inherit` with several residuals first.

        Returns:
            Residuals that no rank has loaded; None: nothing is lost.

        Raises:
            DisagreementError: on all ranks: their states were saved at different steps.
        """
        self._began_s = None
        self.exchange.load_state_dict(state["exchange"])
        if state["residual"] is not None:
            self.exchange.residual.inherit([state["residual"]])
        elif not self.exchange.residual.inherited:
            self.exchange.residual.inherit([])
        return self.exchange.settle()

    def take(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Take a bucket of gradients from DDP, and exchange all of them with the last one.

        Returns:
            A future of the bucket's summed gradients.

        Raises:
            RuntimeError: buckets come in a wrong order, or do not fill the gradient. The other ranks raise
                too, after a lossless sum on a GPU with their next exchange.
        """
        problem = None
        if bucket.index() == 0:  # drop the buckets of a backward pass that failed
            self._buckets.clear()
            self._num_taken = 0
        elif bucket.index() != len(self._buckets):
            problem = RuntimeError(
                f"bucket {bucket.index()} of the gradients came where bucket {len(self._buckets)} was due: "
                "let DDP alone call this hook, with each bucket once in a backward pass"
            )
        pairs = list(zip(bucket.parameters(), bucket.gradients(), strict=True))
        for parameter, gradient in pairs:
            self._num_taken += gradient.numel()
            if id(parameter) in self._pieces:  # else it was frozen before `register`
                self._pieces[id(parameter)].view_as(gradient).copy_(gradient)
        devices: list[int | str | torch.device] = (
            [self._flat.device] if self._flat.device.type == "cuda" else []
        )
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
        self._buckets.append((bucket.buffer(), pairs, future))
        if problem is None and bucket.is_last() and self._num_taken != self.exchange.num_values:
            problem = RuntimeError(
                f"the buckets have {self._num_taken:,} values in all, of {self.exchange.num_values:,}: "
                "parameters were added to the model or frozen since DDP has wrapped it; wrap it again, and "
                "register the hook with that"
            )
        if problem is not None or bucket.is_last():
            self._exchange(problem)
        return future

    def _exchange(self, problem: Exception | None) -> None:
        if not self.exchange.is_settled:
            finish(self._flat.device)  # queued work of a GPU would count as the next step's
        begin_s = time.perf_counter()
        if self._began_s is not None:
            self.exchange.observe(begin_s - self._began_s)
        self._began_s = begin_s
        total, _ = self.exchange.combine(self._flat, mean=self._mean, problem=problem)
        totals = dict(zip(self._pieces, self._split(total), strict=True))
        for buffer, pairs, future in self._buckets:
            # gradients are views of the bucket's buffer, which DDP reads from the future
            for parameter, gradient in pairs:
                gradient.copy_(totals[id(parameter)].view_as(gradient))
                if self._may_be_unused or parameter.grad is None:
                    self._deliver(parameter, gradient)
            future.set_result(buffer)
        self._buckets.clear()

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat[: self.exchange.num_values], self._sizes)

    def _deliver(self, parameter: Tensor, gradient: Tensor) -> None:
        """Write to `.grad` what arrives for a parameter that this rank has not used in this step.

        DDP ignores the buckets of parameters that no rank has used, but residuals of these may arrive.
        """
        if parameter.grad is None:
            if bool(gradient.any()):
                parameter.grad = gradient if self._keeps_views else gradient.clone()
        elif not self._keeps_views:
            parameter.grad.copy_(gradient)


def _check_dtypes(named: Mapping[str, nn.Parameter]) -> None:
    if not named:
        raise ValueError("no parameter of the model is trained: there is nothing to exchange")
    for name, parameter in named.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"{name} is {parameter.dtype}, and an exchange sums fp32 gradients: keep parameters in fp32, "
                "and compute under autocast"
            )
