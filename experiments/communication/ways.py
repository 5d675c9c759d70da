"""How each contender of `experiments.communication` makes a step on a dense part that it shares with others.

The dense part never changes: with a learning rate of 0 a step takes as long, and no contender trains on what
another one has made of the weights.
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
from experiments.communication.contenders import POWER_SGD_RANK, Contender, Rival
from experiments.communication.models import Samples, num_dense

POWER_SGD_STARTS: Final = 2
"""Step at which PowerSGD begins to compress: the first that it allows."""
PRIORITY_STEPS: Final = 4
"""Of a turn, at least: it sends beside the next forward pass, and the last step of a turn has none. After as
many it has found its order."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a contender makes a step."""

    forward: nn.Module
    optimizer: Optimizer
    steps: int
    """Of a turn."""
    update: Callable[[], object]
    """After the backward pass."""
    drain: Callable[[], object] = lambda: None
    """After the last step of a turn."""
    warm_up_steps: int = 2
    """Until steps are alike: memory is there, and buckets are as they will be."""
    replicas: AllReduceSync | None = None
    """Of ours."""

    def step(self, batch: Samples) -> None:
        """One, of all ranks."""
        began = perf_counter()
        self.optimizer.zero_grad()
        logits = self.forward(batch.dense, batch.pooled)
        loss = binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.update()
        if self.replicas is not None:
            self.replicas.updated(perf_counter() - began)


def make_way(contender: Contender, model: nn.Module, steps: int) -> Way:
    """A contender's way; all ranks call it together, in the same order.

    Args:
        contender: one whose steps are all alike.
        model: what it trains; shared with others.
        steps: of a turn.
    """
    if isinstance(contender, Rival):
        forward = model if contender is Rival.NOTHING else distributed(model, contender)
        optimizer = _still(model)
        return Way(
            forward=forward,
            optimizer=optimizer,
            steps=steps,
            update=optimizer.step,
            warm_up_steps=POWER_SGD_STARTS + 2,
        )
    if contender.exchange == "priority":  # takes gradients away from their parameters
        own = copy.deepcopy(model)
        optimizer = _still(own)
        exchange = PriorityExchange(own, optimizer)
        steps = max(PRIORITY_STEPS, steps)
        return Way(
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

    return Way(forward=model, optimizer=optimizer, steps=steps, update=update, replicas=replicas)


def distributed(model: nn.Module, rival: Rival) -> DistributedDataParallel:
    """A model under DDP, with the hook of a rival."""
    # PowerSGD sends several messages a bucket, the later ones from callbacks: with gloo, ranks would mix up
    # those of two buckets
    bucket_mb = num_dense(model) * 4e-6 + 1 if rival is Rival.POWER_SGD else None
    # the rest as TorchRec has it
    wrapped = DistributedDataParallel(
        model, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True, broadcast_buffers=False
    )
    register_hook(wrapped, rival, POWER_SGD_STARTS)
    return wrapped


def register_hook(wrapped: DistributedDataParallel, rival: Rival, start_step: int) -> None:
    """The hook of a rival, where it has one; PowerSGD begins at `start_step`."""
    if rival is Rival.DDP_FP16:
        wrapped.register_comm_hook(None, fp16_compress_hook)
    elif rival is Rival.POWER_SGD:
        state = PowerSGDState(None, POWER_SGD_RANK, start_powerSGD_iter=start_step)
        wrapped.register_comm_hook(state, powerSGD_hook)


def _still(model: nn.Module) -> Optimizer:
    """An optimizer that works as hard as others and changes nothing."""
    return SGD(model.parameters(), lr=0.0, fused=True)
