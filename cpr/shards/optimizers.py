"""TorchRec's optimizers of optimizers, and optimizer state that is made in the first step only."""

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper


def unwrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The optimizers that hold the state, and that PyTorch made hooks for: TorchRec's wrappers call none."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from unwrapped(inner)
    elif isinstance(optimizer, KeyedOptimizerWrapper | OptimizerWrapper):
        yield from unwrapped(optimizer._optimizer)
    else:
        yield optimizer


def without_fused(optimizer: Optimizer) -> Optimizer | None:
    """An optimizer without its fused parts, whose state lives with the rows of their tables.

    Args:
        optimizer: of PyTorch or TorchRec; may be `CombinedOptimizer([model.fused_optimizer, dense])`.

    Returns:
        The optimizer itself if no part of it is fused; None if all are.

    Raises:
        ValueError: a wrapper is around a fused optimizer; says what to pass instead.
    """
    if isinstance(optimizer, FusedOptimizer):
        return None
    if isinstance(optimizer, CombinedOptimizer):
        parts = [(key, part, without_fused(part)) for key, part in optimizer.optimizers]
        if all(left is part for _, part, left in parts):
            return None if not parts else optimizer
        left_over = [(key, left) for key, _, left in parts if isinstance(left, KeyedOptimizer)]
        return CombinedOptimizer(left_over) if left_over else None
    if any(isinstance(inner, FusedOptimizer) for inner in unwrapped(optimizer)):
        raise ValueError(
            f"{type(optimizer).__name__} is around a fused optimizer, which updates tables by itself and its "
            "state is saved with their rows: put it around the dense optimizer alone, and pass that, or "
            "CombinedOptimizer([model.fused_optimizer, that])"
        )
    return optimizer


def ordinary(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers without their fused parts; see `without_fused`."""
    return [left for each in optimizers if (left := without_fused(each)) is not None]


def create_state(optimizer: Optimizer, wanted: Collection[Tensor] | None = None) -> None:
    """Make an optimizer create the state that it would create in its first step, so that a load finds it.

    It takes a step of learning rate 0 on gradients of 0, for parameters without state alone. What it creates
    is the state after one step, not before: only for an optimizer whose state is about to be loaded.

    Args:
        optimizer: its gradients are lost.
        wanted: parameters that get state; None: all.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.zero_grad()
    chosen = None if wanted is None else {id(parameter) for parameter in wanted}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if not optimizer.state.get(parameter) and (chosen is None or id(parameter) in chosen):
            parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    optimizer.zero_grad()


def stateful_parameters(optimizer: Optimizer) -> list[Tensor]:
    """The parameters that an optimizer has made state for."""
    return [parameter for inner in unwrapped(optimizer) for parameter in inner.state]


def forget_state(optimizer: Optimizer, kept: Collection[Tensor]) -> None:
    """Take an optimizer back to before it made its state, for all but some parameters."""
    chosen = {id(parameter) for parameter in kept}
    for inner in unwrapped(optimizer):
        for parameter in [each for each in inner.state if id(each) not in chosen]:
            del inner.state[parameter]
