"""Averages gradients of two replicas of the dense parameters that train on alternate waves."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from dlrm.comm.config import CommConfig
from dlrm.dense_sync.allreduce import AllReduceSync

LAST_WAVE: Final = "last_wave"
"""Key of the last wave's gradients in `DenseSync.state_dict`."""


class TickTockSync(AllReduceSync):
    """Uses each wave's gradients twice: in its own replica, and a wave later in the other one (Wavelet).

    A step has two waves. With `g_m`, the gradient of wave `m` as a part of its step's mean over the samples,
    the first replica is updated by `g_m + g_(m-1)`, whose second term is of the step before, and the second
    replica by `g_(m+1) + g_m`. The very first wave has none before it and counts twice.

    Args:
        first: dense fp32 parameters of the first replica, equal on all ranks.
        second: of the second replica, in the same order.
        num_scalars: number of fp32 scalars in each step.
        comm: the exchange; None: one fp32 all-reduce of all gradients and scalars.
    """

    def __init__(
        self,
        first: Sequence[nn.Parameter],
        second: Sequence[nn.Parameter],
        num_scalars: int,
        comm: CommConfig | None = None,
    ) -> None:
        super().__init__([*first, *second], num_scalars, comm)
        self._first, self._second = list(first), list(second)
        self._last: list[Tensor] = []
        """Mean gradients of the last wave of the step before."""

    def average(self, scalars: Tensor) -> Tensor:
        """See `DenseSync.average`."""
        scalars = super().average(scalars)
        tick, tock = _gradients(self._first), _gradients(self._second)
        of_first = torch._foreach_add(tick, self._last or tick)
        of_second = torch._foreach_add(tock, tick)
        self._last = [each.clone() for each in tock]  # buffers of the exchange are used again
        for parameters, gradients in ((self._first, of_first), (self._second, of_second)):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
        return scalars

    def state_dict(self) -> dict[str, Any]:
        """See `DenseSync.state_dict`."""
        return {**super().state_dict(), LAST_WAVE: list(self._last)}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """See `DenseSync.load_state_dict`."""
        super().load_state_dict(state, steps_done)
        self._last = [each.clone() for each in state.get(LAST_WAVE, [])]


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
