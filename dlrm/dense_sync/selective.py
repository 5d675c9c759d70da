"""Replicas that train on their own and average parameters when gradients have changed much (SelSync)."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from dlrm.comm.controllers.controller import SumOverRanks
from dlrm.comm.controllers.selsync import SelSync, averaged_state
from dlrm.comm.feedback import LostResiduals
from dlrm.comm.stats import ExchangeFigures, Tally
from dlrm.dense_sync.base import DenseSync, ring_bytes


class SelectiveSync(DenseSync):
    """Averages parameters instead of gradients, in some of the steps; see `SelSync`.

    A checkpoint holds rank 0's replica. Ranks average in steps that are saved as a whole, so that it is every
    rank's; replicas that a failure brings back from other steps are averaged before training resumes.

    Args:
        parameters: dense fp32 parameters, equal on all ranks.
        optimizer: of the parameters.
        change: relative change of a gradient's energy above which ranks average; 0: in each step.
        save_every_steps: everything is saved after steps whose number in the run is a multiple of this; 0:
            never, or at unknown steps.
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
        self._tally = Tally(device)
        self._is_due = False
        self._was_apart = False
        self._steps_done = 0  # of the run, steps with another synchronization included

    @property
    def own(self) -> SelSync:
        """See `DenseSync.own`: the smoothed energy of this rank's gradients."""
        return self._sync

    def average(self, scalars: Tensor) -> Tensor:
        """Average the scalars, and agree in the same sum on whether parameters are averaged as well."""
        self._tally.start()
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:  # optimizers create state when they see a gradient, on all ranks alike
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        self._is_due, sums = self._sync.should_sync(norm, scalars)
        self._tally.stop()
        return sums / dist.get_world_size()

    def updated(self, seconds: float) -> None:
        """Average the parameters, if ranks agreed on it or the step is saved."""
        self._tally.step(seconds)
        self._steps_done += 1
        is_saved = self._save_every_steps > 0 and self._steps_done % self._save_every_steps == 0
        num_values = 0
        if self._is_due or is_saved:
            self._tally.start()
            num_values = self._average()
            self._tally.stop()
        self._tally.exchange(int(num_values > 0), 1, ring_bytes(num_values + 1))  # 1 for the flag

    def join(self) -> None:
        """Average the parameters, unless replicas are equal."""
        if not self._sync.is_joined:
            self._average()

    def take_figures(self) -> ExchangeFigures | None:
        """See `DenseSync.take_figures`; the kept share is that of steps in which ranks averaged."""
        return self._tally.take("SelSync")

    def settle(self) -> LostResiduals | None:
        """Average the parameters, if replicas differed in the loaded state."""
        if self._was_apart:
            self._average()
        return None

    def state_dict(self) -> dict[str, Any]:
        """See `DenseSync.state_dict`."""
        return {"apart": {"is_apart": not self._sync.is_joined}}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """See `DenseSync.load_state_dict`."""
        self._steps_done = steps_done
        self._was_apart = "apart" in state and state["apart"]["is_apart"]
        super().load_state_dict(state, steps_done)

    def _average(self) -> int:
        """Average parameters and optimizer state, and return their number of values."""
        state = averaged_state(self._optimizer)
        self._sync.average(self._parameters, state)
        return sum(tensor.numel() for tensor in (*self._parameters, *state))
