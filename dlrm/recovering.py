"""The training loop's session on partial recovery: survivors keep what they hold."""

import logging
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from cpr.recovery.record import Recovery as Story
from cpr.session import PartialRecovery
from dlrm.config import Config
from dlrm.report import FailureReport

AFTER_FAILURE: Final = {"process", "partial", "full"}
"""Kinds of recovery, see `cpr.recovery.decision`."""

logger = logging.getLogger(__name__)


class Recovering:
    """A session whose workers may die.

    Args:
        recovery: its workers have met, and the model is built.
        config: of the run.
        restore: brings model and states to where training goes on.
    """

    def __init__(
        self,
        recovery: PartialRecovery,
        config: Config,
        restore: Callable[[], Story],
    ) -> None:
        self._recovery = recovery
        self._config = config
        self._restore = restore

    @property
    def batches_to_skip(self) -> int:
        """Batches that come next and were begun by workers that died in the middle."""
        return self._recovery.batches_to_skip

    @property
    def failures(self) -> FailureReport:
        """What the run went through; beginning and resuming are no failures."""
        stories = [story for story in self._recovery.recoveries if story.kind in AFTER_FAILURE]
        return FailureReport(recoveries=tuple(story.to_dict() for story in stories), pls=self._recovery.pls)

    def restore(self) -> None:
        """Bring model and position back to where training goes on.

        Raises:
            CheckpointError: what is needed from the checkpoint cannot be read; says what to do.
        """
        self._restore()

    def step(self) -> None:
        """A step is complete: it will not be lost, unless its node is.

        Raises:
            SaveFailedError: saves fail again and again.
        """
        self._recovery.step(self._config.data.global_batch_size)

    @property
    def leaving_takes(self) -> timedelta:
        """The longest that `leave` may take."""
        return timedelta(seconds=self._config.checkpoint.stop_within_s)

    def leave(self, spent: timedelta) -> None:
        """Save if the remaining time allows it, and free the memory, unless somebody may come for it.

        Under `cpr run` an agent may stop its workers because another one has died, and not because the run is
        to end. If it is, the memory is freed when `cpr run` has ended.
        """
        deadline = time.monotonic() + (self.leaving_takes - spent).total_seconds()
        checkpointer, step = self._recovery.checkpointer, self._recovery.steps_done
        remaining_s = deadline - time.monotonic()
        save = checkpointer.save("consistent", timeout_s=remaining_s) if remaining_s > 0 else None
        if save is not None and checkpointer.wait(max(0.0, deadline - time.monotonic())):
            logger.info("saved at step %d before leaving", step)
        else:
            newest = checkpointer.newest_step
            logger.warning(
                "not saved before leaving at step %d: %s",
                step,
                "there is no save" if newest is None else f"the newest save is from step {newest}",
            )
        if "CPR_LAUNCH" not in os.environ:
            self._recovery.abandon()

    def finish(self) -> None:
        """Training has reached its end: save it, and free the memory."""
        self._recovery.close()

    def close(self) -> None:
        """Nothing: leaving the block of `cpr.PartialRecovery` decides what becomes of the memory."""
