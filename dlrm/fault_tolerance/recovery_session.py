"""The training loop's session on partial recovery: survivors keep what they hold."""

import logging
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Final

from cpr.estimator.history import RunHistory, SaveCost
from cpr.recovery.run.report import Recovery as Story
from cpr.session import PartialRecovery
from dlrm.config.schema import Config
from dlrm.telemetry.report import FailureReport, SavesReport

AFTER_FAILURE: Final = {"process", "partial", "full"}
"""Kinds of recovery, see `cpr.recovery.decide.decision`."""

logger = logging.getLogger(__name__)


class RecoverySession:
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

    def note_skipped(self) -> None:
        """One of them was taken from the data and left out."""
        self._recovery.note_skipped()

    @property
    def failures(self) -> FailureReport:
        """What the run went through; beginning and resuming are no failures."""
        return FailureReport(
            recoveries=tuple(story.to_dict() for story in self.recoveries),
            pls=self._recovery.pls,
            saves=_saves(self._recovery.history),
        )

    @property
    def recoveries(self) -> list[Story]:
        """Those after failures, oldest first."""
        return [story for story in self._recovery.recoveries if story.kind in AFTER_FAILURE]

    def take_save_costs(self) -> list[SaveCost]:
        """What the saves took that were committed since this was last asked."""
        return self._recovery.take_save_costs()

    def restore(self) -> None:
        """Bring model and position back to where training goes on.

        Raises:
            CheckpointError: what is needed from the checkpoint cannot be read; says what to do.
        """
        self._restore()

    def step(self) -> None:
        """A step is complete: it will not be lost, unless its node is.

        Raises:
            SaveFailedError: saves have failed for `checkpoint.give_up_after`, or another run owns the
                directory.
        """
        self._recovery.step(self._config.data.global_batch_size)

    @property
    def leaving_takes(self) -> timedelta:
        """The longest that `leave` may take."""
        return timedelta(seconds=self._config.checkpoint.stop_within_s)

    def leave(self, spent: timedelta) -> None:
        """Save if the remaining time allows it.

        The memory stays: torchrun stops workers to start others, too, when nodes come or go. When it has
        ended, the memory is freed.
        """
        remaining_s = (self.leaving_takes - spent).total_seconds()
        step = self._recovery.steps_done
        if self._recovery.save_now(remaining_s):  # ranks agree on it: some have heard of the stop later
            logger.info("saved at step %d before leaving", step)
            return
        newest = self._recovery.checkpointer.newest_step
        logger.warning(
            "not saved before leaving at step %d: %s",
            step,
            "there is no save" if newest is None else f"the newest save is from step {newest}",
        )

    def save_end(self) -> None:
        """Save the end of training, and wait until it is safe; the memory stays until all is over."""
        self._recovery.save_now()

    def finish(self) -> None:
        """Training has reached its end: save it, and free the memory."""
        self._recovery.close()

    def close(self) -> None:
        """Nothing: leaving the block of `cpr.PartialRecovery` decides what becomes of the memory."""


def _saves(history: RunHistory | None) -> SavesReport | None:
    """What saving cost; None on ranks that do not know, and where nothing was saved."""
    if history is None or not history.saves:
        return None
    of_rows = [save.blocked_s for save in history.saves if save.kind == "rows"]
    return SavesReport(
        num_bases=len(history.saves) - len(of_rows),
        num_row_saves=len(of_rows),
        blocked_s=median(of_rows or [save.blocked_s for save in history.saves]),
    )
