"""Replicas whose gradients are averaged in slices, in the background of the next forward pass (P3)."""

import torch
from torch import Tensor, nn

from dlrm.comm.p3.scheduler import PriorityExchange
from dlrm.comm.stats import ExchangeFigures, Tally
from dlrm.dense_sync.base import DenseSync, mean_over_ranks, ring_bytes
from dlrm.optim.build import Optimizers


class P3Sync(DenseSync):
    """Averages gradients in slices by a `PriorityExchange`.

    Args:
        model: with the dense parameters.
        optimizers: of the model; from now on, the dense one steps layer by layer.
        reads_each_step: whether parameters are read after each step, as partial recovery does; the exchange
            then overlaps with the rest of the backward pass only.
    """

    def __init__(self, model: nn.Module, optimizers: Optimizers, reads_each_step: bool) -> None:
        self._reads_each_step = reads_each_step
        self._exchange = PriorityExchange(model, optimizers.dense)
        self._num_values = sum(
            parameter.numel() for group in optimizers.dense.param_groups for parameter in group["params"]
        )
        self._waited_s = 0.0
        self._tally = Tally(torch.device("cpu"))  # which times nothing itself
        optimizers.step_dense = self._exchange.step

    def average(self, scalars: Tensor) -> Tensor:
        """Average the scalars; the gradients are being sent already."""
        return mean_over_ranks(scalars)

    def updated(self, seconds: float) -> None:
        """See `DenseSync.updated`."""
        if self._reads_each_step:
            self.join()
        self._tally.step(seconds)
        self._tally.exchange(self._num_values, self._num_values, ring_bytes(self._num_values))

    def join(self) -> None:
        """Wait for all updates."""
        self._exchange.finish()

    def take_figures(self) -> ExchangeFigures | None:
        """See `DenseSync.take_figures`; the seconds are those that training has waited for gradients."""
        self._tally.waited(self._exchange.waited_s - self._waited_s)
        self._waited_s = self._exchange.waited_s
        return self._tally.take("slices by priority")

    def close(self) -> None:
        """End the thread of the exchange."""
        self._exchange.close()
