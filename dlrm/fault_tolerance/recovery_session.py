"""The training loop's session with partial recovery: surviving workers keep their tables after a failure."""

import logging
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Final

from cpr.estimator.history import RunHistory, SaveCost
from cpr.recovery.run.report import Recovery
from cpr.session import PartialRecovery
from dlrm.config.schema import Config
from dlrm.fault_tolerance.session import Session, warn_unsaved
from dlrm.telemetry.report import FailureHistory, SavesReport

AFTER_FAILURE: Final = {"process", "partial", "full"}
"""Kinds of recovery that follow a failure, see `cpr.recovery.decide.decision`; a start or resume is none."""

logger = logging.getLogger(__name__)


class RecoverySession(Session):
    """`cpr.PartialRecovery`, after it joined its workers, behind the methods that the training loop calls."""

    def __init__(self, recovery: PartialRecovery, config: Config, restore: Callable[[], Recovery]) -> None:
        self._recovery = recovery
        self._config = config
        self._restore = restore

    @property
    def batches_to_skip(self) -> int:
        """Number of next batches to drop, because a worker died while it trained on them."""
        return self._recovery.batches_to_skip

    def note_skipped(self) -> None:
        """Count one dropped batch."""
        self._recovery.note_skipped()

    @property
    def failures(self) -> FailureHistory:
        """Recoveries, portion of lost samples and cost of saves."""
        return FailureHistory(
            recoveries=tuple(recovery.to_dict() for recovery in self.recoveries),
            pls=self._recovery.pls,
            saves=_saves(self._recovery.history),
        )

    @property
    def recoveries(self) -> list[Recovery]:
        """Recoveries after failures, oldest first."""
        return [recovery for recovery in self._recovery.recoveries if recovery.kind in AFTER_FAILURE]

    def take_save_costs(self) -> list[SaveCost]:
        """Costs of the saves committed since the last call."""
        return self._recovery.take_save_costs()

    def restore(self) -> None:
        """Restore model and data position.

        Raises:
            CheckpointError: rows that only the checkpoint holds cannot be read.
        """
        self._restore()

    def step(self) -> None:
        """Publish the step, so that it survives the death of this process.

        Raises:
            SaveFailedError: saves have failed for `checkpoint.give_up_after`, or another run owns the
                directory.
        """
        self._recovery.step(self._config.data.global_batch_size)

    @property
    def leaving_takes(self) -> timedelta:
        """`checkpoint.stop_within_s`."""
        return timedelta(seconds=self._config.checkpoint.stop_within_s)

    def leave(self, spent: timedelta) -> None:
        """Save if the remaining time allows it, and keep the resident memory.

        The memory is freed only after torchrun itself has ended, because torchrun also stops workers to start
        others when nodes join or leave.
        """
        remaining_s = (self.leaving_takes - spent).total_seconds()
        step = self._recovery.steps_done
        if self._recovery.save_now(remaining_s):  # a collective: ranks got the signal at different times
            logger.info("saved at step %d before leaving", step)
            return
        warn_unsaved(step, self._recovery.checkpointer.newest_step)

    def save_end(self) -> None:
        """Save the trained state and wait for the commit; the resident memory stays until `finish`."""
        self._recovery.save_now()

    def finish(self) -> None:
        """Save the trained state and free the resident memory."""
        self._recovery.close()


def _saves(history: RunHistory | None) -> SavesReport | None:
    """What saving cost; None on ranks without a history, and before the first save."""
    if history is None or not history.saves:
        return None
    of_rows = [save.blocked_s for save in history.saves if save.kind == "rows"]
    return SavesReport(
        num_bases=len(history.saves) - len(of_rows),
        num_row_saves=len(of_rows),
        blocked_s=median(of_rows or [save.blocked_s for save in history.saves]),
    )
