"""What the training loop asks of whoever keeps replicas alike, and how its scalars travel when alone."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

import torch.distributed as dist
from torch import Tensor

from cpr.checkpoint.state.model_state import Heir, Stateful
from dlrm.comm.feedback.residual import LostResiduals
from dlrm.comm.stats.figures import ExchangeFigures

EXCHANGE: Final = "exchange"
"""Under which the state of an exchange of gradients is kept."""

logger = logging.getLogger(__name__)


class DenseSync(Protocol):
    """Keeps the dense parameters of all ranks alike, in some sense. All ranks call it in the same order."""

    @property
    def own(self) -> Stateful | Heir | None:
        """State that is this rank's alone; None: there is none."""

    @property
    def losses(self) -> Sequence[LostResiduals]:
        """Gradients that failures have cost the run before they were sent."""

    def average(self, scalars: Tensor) -> Tensor:
        """Between the backward pass and the update.

        Args:
            scalars: fp32 `[n]`; they arrive whole in each step, whatever becomes of gradients.

        Returns:
            Their means over all ranks.
        """

    def updated(self, seconds: float) -> None:
        """The optimizer has done its part; the step took so long on this rank."""

    def join(self) -> None:
        """Make parameters equal and fit to be read: before they are evaluated, checked or saved."""

    def take_figures(self) -> ExchangeFigures | None:
        """What exchanges took per step since this was last asked; None: there was none."""

    def settle(self) -> LostResiduals | None:
        """After states were loaded, or none were, once; what was lost by that."""

    def close(self) -> None:
        """Training is over, in whatever way."""

    def state_dict(self) -> dict[str, Any]:
        """What is the same on all ranks."""

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """Go on from there.

        Args:
            state: of whoever kept replicas alike before; empty: nobody said.
            steps_done: of the run.
        """


def mean_over_ranks(scalars: Tensor) -> Tensor:
    """The means of some scalars, where nothing else travels that could take them along."""
    if dist.get_world_size() > 1:
        dist.all_reduce(scalars)
        scalars /= dist.get_world_size()
    return scalars


def warn_of_dropped(state: Mapping[str, Any]) -> None:
    """Tell that gradients which were not sent yet are of no use to this way of exchange."""
    if state.get(EXCHANGE, {}).get("owners"):
        logger.warning(
            "the run that goes on owed gradients that it had not sent yet, and comm.exchange is now another, "
            "which drops them: to send them first, go on with comm.exchange=ring for some steps"
        )
