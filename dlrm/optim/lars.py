"""LARS: SGD with momentum in which every layer's rate follows the size of its weights.

    rate = trust_coefficient * ||w|| / (||g|| + weight_decay * ||w||)
    v    = momentum * v + lr * rate * (g + weight_decay * w)
    w    = w - v

This is the form in which Jia et al. (arXiv 1807.11205) use the LARS of You, Gitman and Ginsburg (arXiv
1708.03888): all norms in fp32, and no decay of biases. Every tensor, biases too, has a rate of its own; it is
the trust coefficient where weights or gradient are all 0.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from dlrm.optim.layerwise import LayerOptimizer, check_options, decay_of, paired_norms, trust
from dlrm.optim.norms import Norms, local_norms


class LARS(LayerOptimizer):
    """Layer-wise adaptive rate scaling.

    Args:
        params: fp32 parameters; those without a gradient stay as they are.
        lr: learning rate, often above 1: the trust coefficient makes it small.
        momentum: from 0 to below 1.
        weight_decay: of parameters with two dimensions or more.
        trust_coefficient: share of a layer's norm that a step of rate 1 may change.
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
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        norms: Norms = local_norms,
    ) -> None:
        check_options(lr, weight_decay)
        if not 0 <= momentum < 1 or trust_coefficient <= 0:
            raise ValueError(
                f"momentum={momentum} must be from 0 to below 1, and trust_coefficient={trust_coefficient} "
                "positive"
            )
        options = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        super().__init__(params, options, norms)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        gradients = [each.grad for each in parameters if each.grad is not None]
        decays = [decay_of(parameter, group["weight_decay"]) for parameter in parameters]
        weights_norm, gradients_norm = paired_norms(self._norms, parameters, gradients)
        decayed = gradients_norm + weights_norm * weights_norm.new_tensor(decays)
        # without a gradient decay would set the rate, cancel from it, and shrink the layer whatever its size
        unknown = (weights_norm == 0) | (gradients_norm == 0)
        rates = group["lr"] * group["trust_coefficient"] * trust(weights_norm, decayed, unknown)
        for parameter, gradient, decay, rate in zip(
            parameters, gradients, decays, rates.unbind(), strict=True
        ):
            state = self.state[parameter]
            if not state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            change = gradient.add(parameter, alpha=decay) if decay else gradient
            state["momentum_buffer"].mul_(group["momentum"]).addcmul_(change, rate)
            parameter.sub_(state["momentum_buffer"])
