"""The step of each contender of `experiments.communication` on a dense part that all contenders share.

With a learning rate of 0 the dense part never changes, so that the steps of one contender do not affect those
of another one. Such a step takes as long as any other.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Final

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

from dlrm.comm.p3.scheduler import PriorityExchange
from dlrm.dense_sync import AllReduceSync
from experiments.communication.contenders import POWER_SGD_RANK, Baseline, Contender
from experiments.communication.models import Samples, num_dense

POWER_SGD_STARTS: Final = 2
"""Step at which PowerSGD starts to compress, the first that it allows."""
PRIORITY_STEPS: Final = 4
"""Minimum of steps of a turn of the priority exchange, which overlaps with the next forward pass, and the
last step of a turn has none. After as many steps it has determined the order of its parameters."""


@dataclass(frozen=True, kw_only=True)
class ContenderStep:
    """A contender's step."""

    forward: nn.Module
    optimizer: Optimizer
    steps: int
    """Steps of a turn."""
    update: Callable[[], object]
    """Called after the backward pass."""
    drain: Callable[[], object] = lambda: None
    """Called after the last step of a turn."""
    warm_up_steps: int = 2
    """Steps until memory is allocated and buckets are final."""
    replicas: AllReduceSync | None = None
    """The synchronizer of a contender of this project."""

    def step(self, batch: Samples) -> None:
        """Make one step on all ranks."""
        began = perf_counter()
        self.optimizer.zero_grad()
        logits = self.forward(batch.dense, batch.pooled)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        if self.replicas is not None:
            self.replicas.updated(perf_counter() - began)


def make_step(contender: Contender, model: nn.Module, steps: int) -> ContenderStep:
    """Set up a contender's step, `steps` of which are a turn; a collective call on all ranks."""
    if isinstance(contender, Baseline):
        forward = model if contender is Baseline.NOTHING else distributed(model, contender)
        optimizer = _still(model)
        return ContenderStep(
            forward=forward,
            optimizer=optimizer,
            steps=steps,
            update=optimizer.step,
            warm_up_steps=POWER_SGD_STARTS + 2,
        )
    if contender.exchange == "priority":  # this exchange takes gradients away from their parameters
        own = copy.deepcopy(model)
        optimizer = _still(own)
        exchange = PriorityExchange(own, optimizer)
        steps = max(PRIORITY_STEPS, steps)
        return ContenderStep(
            forward=own,
            optimizer=optimizer,
            steps=steps,
            update=exchange.step,
            drain=exchange.finish,
            warm_up_steps=PRIORITY_STEPS,
        )
    optimizer, replicas = _still(model), AllReduceSync(list(model.parameters()), 0, contender)

    def update() -> None:
        replicas.average(torch.empty(0))
        optimizer.step()

    return ContenderStep(forward=model, optimizer=optimizer, steps=steps, update=update, replicas=replicas)


def distributed(model: nn.Module, baseline: Baseline) -> DistributedDataParallel:
    """Wrap a model in DDP, with a hook of PyTorch."""
    # one bucket for PowerSGD: it sends several messages per bucket, the later ones from callbacks, and with
    # gloo ranks could mix up those of two buckets
    bucket_mb = num_dense(model) * 4e-6 + 1 if baseline is Baseline.POWER_SGD else None
    # the other settings are TorchRec's
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    register_hook(wrapped, baseline, POWER_SGD_STARTS)
    return wrapped


def register_hook(wrapped: DistributedDataParallel, baseline: Baseline, start_step: int) -> None:
    """Register PyTorch's communication hook of a baseline, if any; PowerSGD starts at `start_step`."""
    if baseline is Baseline.DDP_FP16:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif baseline is Baseline.POWER_SGD:
        state = PowerSGDState(None, POWER_SGD_RANK, start_powerSGD_iter=start_step)
        wrapped.register_comm_hook(state, powerSGD_hook)


def _still(model: nn.Module) -> Optimizer:
    """An optimizer with learning rate 0, which costs as much as any other and changes nothing."""
    return SGD(model.parameters(), lr=0.0, fused=True)
