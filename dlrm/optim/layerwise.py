"""What LARS and LAMB share: the step, which parameters decay, and how far a layer is trusted."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.optim.norms import Norms


class LayerOptimizer(Optimizer):
    """An optimizer that asks for norms of layers.

    Args:
        params: as for `torch.optim.Optimizer`.
        options: of all groups that have no others.
        norms: how norms are found.
    """

    def __init__(self, params: Iterable[nn.Parameter], options: dict[str, Any], norms: Norms) -> None:
        super().__init__(params, options)
        self._norms = norms

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss, and gradients, again; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._update([each for each in group["params"] if each.grad is not None], group)
        return loss

    @abstractmethod
    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update these, which have gradients, by the options of their group; called without autograd."""


def decay_of(parameter: nn.Parameter, weight_decay: float) -> float:
    """The weight decay of a parameter: none of biases, and of whatever else has a single dimension.

    So Jia et al., arXiv 1807.11205, for biases and the parameters of batch normalization.
    """
    return weight_decay if parameter.dim() > 1 else 0.0


def paired_norms(norms: Norms, left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The norms of both lists, asked for at once: fp32 `[len(left)]` and `[len(right)]`."""
    found = norms([*left, *right])
    return found[: len(left)], found[len(left) :]


def trust(upper: Tensor, lower: Tensor, unknown: Tensor) -> Tensor:
    """`upper / lower`, elementwise; 1 where it is `unknown`, so that a layer of zeros can begin to learn."""
    return torch.where(unknown, torch.ones_like(upper), upper / lower)


def check_options(lr: float, weight_decay: float) -> None:
    """Refuse what no optimizer here can work with.

    Raises:
        ValueError: a rate or a decay is negative.
    """
    if lr < 0 or weight_decay < 0:
        raise ValueError(f"lr={lr} and weight_decay={weight_decay} must not be negative")
