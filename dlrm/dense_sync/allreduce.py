"""Replicas whose gradients are averaged in each step, and a few scalars with them.

The scalars travel along because every decision that all ranks must take together (stop, diverged) then
costs next to nothing and cannot disagree.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.comm.build import build_exchange
from dlrm.comm.config import CommConfig
from dlrm.comm.consistency.parameters import check_alike
from dlrm.comm.feedback.residual import LostResiduals, Residual
from dlrm.comm.stats.figures import ExchangeFigures
from dlrm.dense_sync.base import EXCHANGE


class AllReduceSync:
    """Averages gradients over all ranks; see `KeptAlike`.

    Args:
        parameters: dense fp32 parameters, equal on all ranks.
        num_scalars: fp32 numbers that travel along each time.
        comm: how gradients travel; None: all of them, in one fp32 all-reduce with the scalars.

    Raises:
        ValueError: ranks have different parameters or ways of exchange; all ranks raise it, and make
            `AllReduceSync` together.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], num_scalars: int, comm: CommConfig | None = None
    ) -> None:
        self._parameters = list(parameters)
        named = {f"dense parameter {number}": each for number, each in enumerate(self._parameters)}
        check_alike(named, None, options=comm or CommConfig())
        self._sizes = [parameter.numel() for parameter in self._parameters]
        device = self._parameters[0].device
        self._num_scalars = num_scalars
        self._exchange = build_exchange(comm or CommConfig(), sum(self._sizes), device)
        self._flat = self._exchange.make_room(num_scalars)
        used = sum(self._sizes) + num_scalars
        *pieces, self._scalars = torch.split(self._flat[:used], [*self._sizes, num_scalars])
        self._gradients = self._shaped(pieces)

    @property
    def own(self) -> Residual | None:
        """See `KeptAlike`: the gradients that this rank has not sent yet, and its compressor's draws."""
        return self._exchange.residual if self._exchange.residual.is_worth_saving else None

    @property
    def losses(self) -> Sequence[LostResiduals]:
        """See `KeptAlike`."""
        return self._exchange.losses

    @property
    def chosen(self) -> str | None:
        """Of comm.exchange=auto: the collective that it has decided for, by name; None: not yet."""
        return self._exchange.chosen

    @property
    def is_settled(self) -> bool:
        """Whether comm.exchange=auto tries nothing any more."""
        return self._exchange.is_settled

    def average(self, scalars: Tensor) -> Tensor:
        """Replace each parameter's gradient by its mean over all ranks; return the mean of `scalars`.

        Args:
            scalars: fp32 `[num_scalars]`.
        """
        if dist.get_world_size() == 1 and not self._exchange.residual.is_owed:
            return scalars
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        torch._foreach_copy_([*self._gradients, self._scalars], [*gradients, scalars])
        mean, scalars = self._exchange.combine(self._flat, num_scalars=self._num_scalars, mean=True)
        means = self._gradients
        if mean.data_ptr() != self._flat.data_ptr():
            means = self._shaped(torch.split(mean, self._sizes))
        for parameter, gradient in zip(self._parameters, means, strict=True):
            parameter.grad = gradient
        return scalars

    def updated(self, seconds: float) -> None:
        """See `KeptAlike`."""
        self._exchange.observe(seconds)

    def join(self) -> None:
        """Nothing: replicas are always equal."""

    def take_figures(self) -> ExchangeFigures | None:
        """See `KeptAlike`."""
        return self._exchange.take_figures()

    def settle(self) -> LostResiduals | None:
        """See `KeptAlike`."""
        return self._exchange.settle()

    def close(self) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """See `KeptAlike`."""
        return {EXCHANGE: self._exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """See `KeptAlike`."""
        if EXCHANGE in state:
            self._exchange.load_state_dict(state[EXCHANGE])

    def _shaped(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self._parameters, strict=True)]
