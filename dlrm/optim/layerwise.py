"""LARS and LAMB: optimizers for large batches that scale the learning rate of each layer by its norms.

Both take parameters in fp32, update those that have a gradient, and leave out the weight decay of biases and
of other one-dimensional tensors (Jia et al., arXiv 1807.11205). Every tensor, biases too, has its own rate.
"""

import functools
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.optim.norms import Norms, local_norms


class _LayerwiseOptimizer(Optimizer):
    """The step that LARS and LAMB share; subclasses update the parameters of a group."""

    def __init__(self, params: Iterable[nn.Parameter], options: dict[str, Any], norms: Norms) -> None:
        super().__init__(params, options)
        self._norms = norms

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # there is no use for a closure
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            self._update([each for each in group["params"] if each.grad is not None], group)

    @abstractmethod
    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters that have gradients, by the options of their group; called without autograd."""

    def _paired_norms(self, left: Sequence[Tensor], right: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The norms of both lists in a single call: fp32 `[len(left)]` and `[len(right)]`."""
        found = self._norms([*left, *right])
        return found[: len(left)], found[len(left) :]


class LARS(_LayerwiseOptimizer):
    """LARS: SGD with momentum in which each layer's rate follows the norm of its weights.

        rate = trust_coefficient * ||w|| / (||g|| + weight_decay * ||w||)
        v    = momentum * v + lr * rate * (g + weight_decay * w)
        w    = w - v

    You, Gitman and Ginsburg (arXiv 1708.03888), in the form of Jia et al. (arXiv 1807.11205). `rate` is the
    trust coefficient where weights or gradient are all 0.

    Args:
        params: as for `torch.optim.Optimizer`.
        lr: learning rate, often above 1: the trust coefficient makes it small.
        momentum: from 0 to below 1.
        weight_decay: of parameters with two dimensions or more.
        trust_coefficient: share of a layer's norm that a step of rate 1 may change.
        norms: computes norms; with `dlrm.optim.norms.SharedNorms`, all ranks step together.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        norms: Norms = local_norms,
    ) -> None:
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, options, norms)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        decays = [_decay_of(parameter, group["weight_decay"]) for parameter in parameters]
        weights_norm, gradients_norm = self._paired_norms(parameters, gradients)
        decayed = gradients_norm + weights_norm * _on_device(tuple(decays), weights_norm.device)
        # without a gradient decay would set the rate, cancel from it, and shrink the layer whatever its size
        unknown = (weights_norm == 0) | (gradients_norm == 0)
        rates = group["lr"] * group["trust_coefficient"] * _trust(weights_norm, decayed, unknown)
        for parameter, gradient, decay, rate in zip(
            parameters, gradients, decays, rates.unbind(), strict=True
        ):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            change = gradient.add(parameter, alpha=decay) if decay else gradient
            state["momentum_buffer"].mul_(group["momentum"]).addcmul_(change, rate)
            parameter.sub_(state["momentum_buffer"])


class LAMB(_LayerwiseOptimizer):
    """LAMB: Adam in which each layer's step is as long, relative to its weights, as the learning rate says.

        m = beta1 * m + (1 - beta1) * g,    m^ = m / (1 - beta1 ** t)
        v = beta2 * v + (1 - beta2) * g^2,  v^ = v / (1 - beta2 ** t)
        u = m^ / (sqrt(v^) + eps) + weight_decay * w
        w = w - lr * ||w|| / ||u|| * u

    You et al. (arXiv 1904.00962), algorithm 2, with the identity for its function phi of the weights' norm.
    The step is Adam's where weights are all 0.

    Args:
        params: as for `torch.optim.Optimizer`.
        lr: learning rate, about the share of a layer's norm that a step changes.
        betas: decay of the two moments, each from 0 to below 1.
        eps: added to the root of the second moment.
        weight_decay: of parameters with two dimensions or more.
        norms: computes norms; with `dlrm.optim.norms.SharedNorms`, all ranks step together.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        norms: Norms = local_norms,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, norms)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        changes = [self._change(parameter, group) for parameter in parameters]
        weights_norm, changes_norm = self._paired_norms(parameters, changes)
        unknown = (weights_norm == 0) | (changes_norm == 0)
        lengths = _trust(weights_norm, changes_norm, unknown) * -group["lr"]
        for parameter, change, length in zip(parameters, changes, lengths.unbind(), strict=True):
            parameter.addcmul_(change, length)

    def _change(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Adam's step plus weight decay, before its length is set."""
        gradient = parameter.grad
        assert gradient is not None, "only parameters with a gradient are updated"
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
        change: Tensor = mean.div(root).div_(1 - beta1 ** state["step"])
        return change.add_(parameter, alpha=_decay_of(parameter, group["weight_decay"]))


@functools.cache  # a copy to a GPU in each step would wait for it
def _on_device(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device)


def _decay_of(parameter: nn.Parameter, weight_decay: float) -> float:
    return weight_decay if parameter.dim() > 1 else 0.0


def _trust(upper: Tensor, lower: Tensor, unknown: Tensor) -> Tensor:
    # 1 where the ratio is unknown, so that a layer of zeros can start to learn
    return torch.where(unknown, torch.ones_like(upper), upper / lower)
