"""Averages dense gradients over all ranks in each step, with scalars on which ranks base joint decisions."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm.comm.build import build_exchange
from dlrm.comm.config import CommConfig
from dlrm.comm.consistency import check_alike
from dlrm.comm.feedback import LostResiduals, Residual
from dlrm.comm.stats import ExchangeFigures
from dlrm.dense_sync.base import EXCHANGE, DenseSync


class AllReduceSync(DenseSync):
    """Averages gradients over all ranks by an exchange of `dlrm.comm`; all ranks construct it together.

    Args:
        parameters: dense fp32 parameters, equal on all ranks.
        num_scalars: number of fp32 scalars in each step.
        comm: the exchange; None: one fp32 all-reduce of all gradients and scalars.

    Raises:
        ValueError: on all ranks, if they have different parameters or exchanges.
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
        self.exchange = build_exchange(comm or CommConfig(), sum(self._sizes), device)
        """Averages the gradients."""
        self._flat = self.exchange.make_buffer(num_scalars)
        used = sum(self._sizes) + num_scalars
        *pieces, self._scalars = torch.split(self._flat[:used], [*self._sizes, num_scalars])
        self._gradients = self._shaped(pieces)

    @property
    def own(self) -> Residual | None:
        """See `DenseSync.own`: this rank's residual and its compressor's random draws."""
        return self.exchange.residual if self.exchange.residual.needs_saving else None

    @property
    def losses(self) -> Sequence[LostResiduals]:
        """See `DenseSync.losses`."""
        return self.exchange.losses

    def average(self, scalars: Tensor) -> Tensor:
        """Replace each parameter's gradient by its mean over all ranks; see `DenseSync.average`."""
        if dist.get_world_size() == 1 and not self.exchange.residual.is_pending:
            return scalars
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in self._parameters
        ]
        torch._foreach_copy_([*self._gradients, self._scalars], [*gradients, scalars])
        mean, scalars = self.exchange.combine(self._flat, num_scalars=self._num_scalars, mean=True)
        means = self._gradients
        if mean.data_ptr() != self._flat.data_ptr():  # lossy collectives return another buffer
            means = self._shaped(torch.split(mean, self._sizes))
        for parameter, gradient in zip(self._parameters, means, strict=True):
            parameter.grad = gradient
        return scalars

    def updated(self, seconds: float) -> None:
        """See `DenseSync.updated`."""
        self.exchange.observe(seconds)

    def take_figures(self) -> ExchangeFigures | None:
        """See `DenseSync.take_figures`."""
        return self.exchange.take_figures()

    def settle(self) -> LostResiduals | None:
        """See `DenseSync.settle`."""
        return self.exchange.settle()

    def state_dict(self) -> dict[str, Any]:
        """See `DenseSync.state_dict`."""
        return {EXCHANGE: self.exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """See `DenseSync.load_state_dict`."""
        if EXCHANGE in state:
            self.exchange.load_state_dict(state[EXCHANGE])
        super().load_state_dict({name: each for name, each in state.items() if name != EXCHANGE}, steps_done)

    def _shaped(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        return [piece.view_as(parameter) for piece, parameter in zip(pieces, self._parameters, strict=True)]
