"""The interface between the training loop and the synchronization of dense parameters."""

import logging
from collections.abc import Sequence
from typing import Any, ClassVar, Final

import torch.distributed as dist
from torch import Tensor

from cpr.checkpoint.state.model_state import Heir, Stateful
from dlrm.comm.feedback import LostResiduals
from dlrm.comm.stats import ExchangeFigures

EXCHANGE: Final = "exchange"
"""Key of an exchange's state in `DenseSync.state_dict`."""
LATE_GRADIENTS: Final = "late_gradients"
"""Key of the gradients that are not applied yet in `DenseSync.state_dict`."""

logger = logging.getLogger(__name__)


class DenseSync:
    """Keeps the dense parameters of all ranks in sync; all ranks call its methods in the same order."""

    own_name: ClassVar = "replica"
    """Name under which `own` is saved."""

    @property
    def own(self) -> Stateful | Heir | None:
        """State of this rank alone; None: there is none."""
        return None

    @property
    def losses(self) -> Sequence[LostResiduals]:
        """Records of the unsent parts of gradients that were lost with failed ranks; empty if none was."""
        return ()

    def average(self, scalars: Tensor) -> Tensor:
        """Synchronize gradients, between the backward pass and the update.

        Returns the exact means of the scalars, fp32 `[n]`, over all ranks.
        """
        raise NotImplementedError

    def updated(self, seconds: float) -> None:
        """Finish a step after the optimizer's update; the step took `seconds` on this rank."""
        raise NotImplementedError

    def join(self) -> None:
        """Make parameters equal and up to date, before they are evaluated, checked or saved."""

    def take_figures(self) -> ExchangeFigures | None:
        """Return the figures of exchanges since the last call; None: there was none."""
        raise NotImplementedError

    def settle(self) -> LostResiduals | None:
        """Call once after states were loaded, or not; returns the residuals that are lost."""
        return None

    def close(self) -> None:
        """Release threads at the end of training."""

    def state_dict(self) -> dict[str, Any]:
        """State that is the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any], steps_done: int) -> None:
        """Restore a state, maybe of another kind of synchronization, after `steps_done` steps of the run."""
        if state.get(EXCHANGE, {}).get("owners"):
            logger.warning(
                "the resumed run had gradients that were not sent yet, and comm.exchange is now another, "
                "which drops them: to send them first, resume with comm.exchange=ring for some steps"
            )
        if state.get(LATE_GRADIENTS, {}).get("owners"):
            logger.warning(
                "the dense gradient of the last saved step, which train.pipeline=delayed had not applied "
                "yet, is dropped: to apply it, resume with the pipeline and the model of the saved run"
            )


def mean_over_ranks(scalars: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Average scalars over the ranks of a group (None: all) in an all-reduce of their own."""
    dist.all_reduce(scalars, group=group)
    return scalars.div_(dist.get_world_size(group))


def ring_bytes(num_values: int) -> float:
    """Bytes that a rank sends in a ring all-reduce of fp32 values over all ranks."""
    num_ranks = dist.get_world_size()
    return 2 * (num_ranks - 1) / num_ranks * 4 * num_values
