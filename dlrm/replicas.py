"""The dense parameters, equal on all ranks: one all-reduce a step for their gradients and a few scalars.

The scalars travel along because every decision that all ranks must take together (stop, diverged) then
costs nothing and cannot disagree.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Replicas:
    """Averages gradients over all ranks.

    Args:
        parameters: dense fp32 parameters, equal on all ranks.
        num_scalars: fp32 numbers that travel along each time.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], num_scalars: int) -> None:
        self._parameters = list(parameters)
        self._world_size = dist.get_world_size()
        sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device
        self._flat = torch.zeros(sum(sizes) + num_scalars, device=device)
        *pieces, self._scalars = torch.split(self._flat, [*sizes, num_scalars])
        self._gradients = [
            piece.view_as(parameter) for piece, parameter in zip(pieces, self._parameters, strict=True)
        ]

    def average(self, scalars: Tensor) -> Tensor:
        """Replace each parameter's gradient by its mean over all ranks; return the mean of `scalars`.

        Args:
            scalars: fp32 `[num_scalars]`.
        """
        if self._world_size == 1:
            return scalars
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        torch._foreach_copy_([*self._gradients, self._scalars], [*gradients, scalars])
        dist.all_reduce(self._flat)
        self._flat /= self._world_size
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._scalars
