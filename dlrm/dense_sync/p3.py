"""Replicas whose gradients travel beside the next forward pass, in the order in which it needs them (P3)."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from dlrm.comm.feedback.residual import LostResiduals
from dlrm.comm.p3.scheduler import PriorityExchange
from dlrm.comm.stats.figures import ExchangeFigures, Tally
from dlrm.dense_sync.base import mean_over_ranks, warn_of_dropped
from dlrm.optim.build import Optimizers


class P3Sync:
    """Averages gradients in slices; see `KeptAlike` and `PriorityExchange`.

    Args:
        model: whose dense parameters they are.
        optimizers: of the model; from now on, the dense part of it steps layer by layer.
        reads_each_step: whether somebody reads parameters after each step, as partial recovery does; then
            there is only the rest of the backward pass to travel beside.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, reads_each_step: bool) -> None:
        self._reads_each_step = reads_each_step
        self._exchange = PriorityExchange(model, optimizers.dense)
        self._num_values = sum(
            parameter.numel() for group in optimizers.dense.param_groups for parameter in group["params"]
        )
        self._waited_s = 0.0
        self._tally = Tally()
        optimizers.step_dense = self._exchange.step

    losses: Sequence[LostResiduals] = ()
    """None: nobody owes gradients here."""
    own: None = None
    """Nothing is."""

    def average(self, scalars: Tensor) -> Tensor:
        """The mean of the scalars; gradients are on their way already."""
        return mean_over_ranks(scalars)

    def updated(self, seconds: float) -> None:
        """See `KeptAlike`."""
        if self._reads_each_step:
            self.join()
        self._tally.step(seconds)
        num_ranks = dist.get_world_size()
        sent_bytes = 2 * (num_ranks - 1) / num_ranks * 4 * self._num_values
        self._tally.exchange(self._num_values, self._num_values, sent_bytes)

    def join(self) -> None:
        """Wait for all updates."""
        self._exchange.finish()

    def take_figures(self) -> ExchangeFigures | None:
        """See `KeptAlike`; the seconds are those in which training has waited for gradients."""
        self._tally.waited(self._exchange.waited_s - self._waited_s)
        self._waited_s = self._exchange.waited_s
        return self._tally.take("slices by priority")

    def settle(self) -> LostResiduals | None:
        """Nothing was owed."""
        return None

    def close(self) -> None:
        """End the thread that exchanges."""
        self._exchange.close()

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """Nothing comes back; see `warn_of_dropped`."""
        warn_of_dropped(state)
