"""Replicas that go their own ways, and meet when their gradients have changed much (SelSync)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.comm.controllers import SelSync, SumOverRanks, averaged_state
from dlrm.comm.feedback.residual import LostResiduals
from dlrm.comm.stats.figures import ExchangeFigures, Tally
from dlrm.comm.stats.timer import DeviceTimer
from dlrm.dense_sync.base import warn_of_dropped


class SelectiveSync:
    """Averages parameters instead of gradients, in some of the steps; see `KeptAlike` and `SelSync`.

    A checkpoint holds rank 0's replica. In steps that are saved as a whole all ranks meet, so that it is
    everybody's; what a failure brings back from in between is averaged before training goes on.

    Args:
        parameters: dense fp32 parameters, equal on all ranks.
        optimizer: that updates them.
        change: of a gradient's energy, relative, from which on ranks meet; 0: in each step.
        save_every_steps: everything is saved after steps of the run whose number is a multiple of this; 0:
            never, or nobody knows when.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        change: float,
        save_every_steps: int,
    ) -> None:
        self._parameters, self._optimizer = list(parameters), optimizer
        self._save_every_steps = save_every_steps
        device = self._parameters[0].device
        self._sync = SelSync(agree=SumOverRanks(device), delta=change)
        self._stopwatch, self._tally = DeviceTimer(device), Tally()
        self._meets = False
        self._was_apart = False
        self._steps_done = 0  # of the run, those before it was kept alike in this way included

    losses: Sequence[LostResiduals] = ()
    """None: nobody owes gradients here."""

    @property
    def own(self) -> SelSync:
        """See `KeptAlike`: what this rank compares its gradients with."""
        return self._sync

    def average(self, scalars: Tensor) -> Tensor:
        """The mean of the scalars, and whether to meet, in one sum; gradients stay as they are."""
        self._stopwatch.start()
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        self._meets, sums = self._sync.should_sync(norm, scalars)
        self._stopwatch.stop()
        return sums / dist.get_world_size()

    def updated(self, seconds: float) -> None:
        """Meet, if that was agreed."""
        self._tally.step(seconds)
        self._steps_done += 1
        if self._meets or self._is_saved:
            self._stopwatch.start()
            num_values = self._average()
            self._stopwatch.stop()
        else:
            num_values = 0
        num_ranks = dist.get_world_size()
        sent_bytes = 2 * (num_ranks - 1) / num_ranks * 4 * (num_values + 1)  # and the flag
        self._tally.exchange(int(num_values > 0), 1, sent_bytes)

    def join(self) -> None:
        """Meet, unless replicas are equal."""
        if not self._sync.is_joined:
            self._average()

    def take_figures(self) -> ExchangeFigures | None:
        """See `KeptAlike`; the kept share is that of steps in which ranks have met."""
        self._tally.waited(self._stopwatch.take())
        return self._tally.take("SelSync")

    def settle(self) -> LostResiduals | None:
        """Meet, if the state that was loaded is one of replicas that were apart."""
        if self._was_apart:
            self._average()
        return None

    def close(self) -> None:
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """See `KeptAlike`."""
        return {"apart": {"is_apart": not self._sync.is_joined}}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """See `KeptAlike`."""
        self._steps_done = steps_done
        self._was_apart = "apart" in state and state["apart"]["is_apart"]
        warn_of_dropped(state)

    @property
    def _is_saved(self) -> bool:
        return self._save_every_steps > 0 and self._steps_done % self._save_every_steps == 0

    def _average(self) -> int:
        """Meet; the number of values that took."""
        state = averaged_state(self._optimizer)
        self._sync.average(self._parameters, state)
        return sum(tensor.numel() for tensor in (*self._parameters, *state))
