"""LAMB: Adam in which every layer's step is as long, relative to its weights, as the learning rate says.

    m = beta1 * m + (1 - beta1) * g,    m^ = m / (1 - beta1 ** t)
    v = beta2 * v + (1 - beta2) * g^2,  v^ = v / (1 - beta2 ** t)
    u = m^ / (sqrt(v^) + eps) + weight_decay * w
    w = w - lr * ||w|| / ||u|| * u

You et al., arXiv 1904.00962, algorithm 2, with the identity for its function phi of the weights' norm. No
decay of biases; every tensor, biases too, has a step of its own length, Adam's where its weights are all 0.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dlrm.optim.layerwise import LayerOptimizer, check_options, decay_of, paired_norms, trust
from dlrm.optim.norms import Norms, local_norms


class LAMB(LayerOptimizer):
    """Layer-wise adaptive moments.

    Args:
        params: fp32 parameters; those without a gradient stay as they are.
        lr: learning rate, about the share of a layer's norm that a step changes.
        betas: decay of the two moments, each from 0 to below 1.
        eps: added to the root of the second moment.
        weight_decay: of parameters with two dimensions or more.
        norms: how norms are found; `dlrm.optim.norms.SharedNorms` divides that work among the ranks, which
            then all step together.

    Raises:
        ValueError: an option is out of its range.
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
        check_options(lr, weight_decay)
        if not all(0 <= beta < 1 for beta in betas) or eps <= 0:
            raise ValueError(f"betas={betas} must be from 0 to below 1, and eps={eps} positive")
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options, norms)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        changes = [self._change(parameter, group) for parameter in parameters]
        weights_norm, changes_norm = paired_norms(self._norms, parameters, changes)
        unknown = (weights_norm == 0) | (changes_norm == 0)
        lengths = trust(weights_norm, changes_norm, unknown) * -group["lr"]
        for parameter, change, length in zip(parameters, changes, lengths.unbind(), strict=True):
            parameter.addcmul_(change, length)

    def _change(self, parameter: nn.Parameter, group: dict[str, Any]) -> Tensor:
        """Adam's step and the decay of a parameter, before its length is set."""
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
        return change.add_(parameter, alpha=decay_of(parameter, group["weight_decay"]))
