"""Unwrapping of TorchRec's nested optimizers, and creation of optimizer state before the first step."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper


def unwrapped(optimizer: Optimizer) -> Iterator[Optimizer]:
    """The innermost optimizers, which hold the state and call hooks; TorchRec's wrappers call none."""
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from unwrapped(inner)
    elif isinstance(optimizer, KeyedOptimizerWrapper | OptimizerWrapper):
        yield from unwrapped(optimizer._optimizer)
    else:
        yield optimizer


def without_fused(optimizer: Optimizer) -> Optimizer | None:
    """An optimizer without its fused parts, whose state is part of the tables' rows.

    Args:
        optimizer: of PyTorch or TorchRec, such as `CombinedOptimizer([model.fused_optimizer, dense])`.

    Returns:
        The optimizer itself if no part of it is fused; None if all are.

    Raises:
        ValueError: a wrapper contains a fused optimizer; the message names the alternative.
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
    """Create the state that an optimizer creates in its first step, to be overwritten by a load.

    Takes a step with learning rate 0 and zero gradients, for parameters without state only. The result is the
    state after one step, so use it only before a load.

    Args:
        optimizer: loses its gradients.
        wanted: parameters that get state; None: all.
    """
    # learning rate 0 also switches off decoupled weight decay, which scales with it
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
    """The parameters for which an optimizer has state."""
    return [parameter for inner in unwrapped(optimizer) for parameter in inner.state]


def forget_state(optimizer: Optimizer, kept: Collection[Tensor]) -> None:
    """Remove the state of all parameters except `kept` from an optimizer."""
    chosen = {id(parameter) for parameter in kept}
    for inner in unwrapped(optimizer):
        for parameter in [each for each in inner.state if id(each) not in chosen]:
            del inner.state[parameter]


class KeptState:
    """State of the parameters in some memory, which is put back after an optimizer has loaded a state.

    Args:
        optimizer: of PyTorch or TorchRec.
        memory: addresses of the storages of the parameters.
    """

    def __init__(self, optimizer: Optimizer, memory: Collection[int]) -> None:
        if isinstance(optimizer, KeyedOptimizer):
            parameters: dict[Any, Tensor] = dict(optimizer.params)
        else:
            parameters = dict(enumerate(each for group in optimizer.param_groups for each in group["params"]))
        kept = {key: each for key, each in parameters.items() if each.untyped_storage().data_ptr() in memory}
        self.keys = kept.keys()
        """Keys of these parameters in the optimizer's state dict."""
        self._optimizer = optimizer
        states = [inner.state for inner in unwrapped(optimizer)]
        self._states = [
            (each, next((dict(state[each]) for state in states if each in state), None))
            for each in kept.values()
        ]

    def put_back(self) -> None:
        """Replace the state of these parameters by what it was."""
        for inner in unwrapped(self._optimizer):
            mine = {id(each) for group in inner.param_groups for each in group["params"]}
            for parameter, state in self._states:
                if id(parameter) in mine:
                    inner.state.pop(parameter, None)
                    if state is not None:
                        inner.state[parameter] = state
