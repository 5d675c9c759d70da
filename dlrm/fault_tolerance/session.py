"""The fault tolerance that a training loop calls: a base class without any, and full checkpoints.

`Session` itself saves nothing. `Checkpoints` saves the whole run periodically and resumes from the newest
save. `dlrm.fault_tolerance.setup` adds partial recovery.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.state.changes import UNCHANGED, Changes
from cpr.errors import SaveFailedError, SaveRefusedError
from cpr.estimator.history import RunHistory, SaveCost, SaveEvent
from cpr.humanize import count_text
from cpr.mirror.config import MirrorFigures
from cpr.recovery.decide.inventory import PROGRESS_STATE
from cpr.recovery.decide.lineage import refuse_unsaved
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Recovery
from cpr.saving.cadence import FixedPace
from cpr.saving.periodic import Saves
from dlrm.config.schema import CheckpointConfig
from dlrm.telemetry.report import FailureHistory

logger = logging.getLogger(__name__)


class Session:
    """Training without fault tolerance: no state is saved, and a worker's death ends the run.

    Subclasses override what they support. All ranks call each method after the same step.
    """

    @property
    def batches_to_skip(self) -> int:
        """Number of next batches to drop, because a worker died while it trained on them."""
        return 0

    def note_skipped(self) -> None:
        """Called after one of the batches to skip was fetched and dropped."""

    @property
    def failures(self) -> FailureHistory | None:
        """Failure history of the run, or None if not recorded."""
        return None

    @property
    def history(self) -> RunHistory | None:
        """Costs of saves and failures so far, on rank 0; None if not recorded."""
        return None

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """Recoveries after failures, oldest first."""
        return ()

    @property
    def mirror(self) -> MirrorFigures | None:
        """What the mirror of this rank's rows has cost, and its age; None without mirrors."""
        return None

    def take_save_costs(self) -> Sequence[SaveCost | SaveEvent]:
        """Costs of the saves committed since the last call, and those begun and failed."""
        return ()

    def restore(self) -> None:
        """Load model and data position to resume from; called once, before the first step."""

    def step(self, samples: int) -> None:
        """Called after each step, when rows, dense parameters and data position belong together.

        `samples` are those of all ranks in the step.
        """

    @property
    def leaving_takes(self) -> timedelta:
        """Longest time that `leave` may take."""
        return timedelta(0)

    def leave(self, spent: timedelta) -> bool:
        """Called when a signal stops training; `spent` is the time since the signal.

        Returns whether all that was trained is saved, which is the same on all ranks.
        """
        return False

    def save_end(self) -> None:
        """Called after the last step and before the last evaluation, to make the trained state durable."""

    def finish(self) -> None:
        """Called when the run has reached its end."""

    def close(self) -> None:
        """Called when training is over for whatever reason; abandons a save that is under way."""


class Checkpoints(Session):
    """Full background saves every so many steps, at the end, and before a stop if there is time.

    Args:
        checkpointer: has every state registered that a resumed run needs.
        config: when to save, and how.
        resume: load the newest save first.
        initialize: called if nothing is loaded; may set other initial values (warm start).
        changes: how the model may differ from the save that it resumes from.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        resume: bool,
        initialize: Callable[[Checkpointer], object],
        changes: Changes = UNCHANGED,
    ) -> None:
        self._checkpointer = checkpointer
        self._config = config
        self._resume, self._initialize, self._changes = resume, initialize, changes
        self._progress = RunProgress()
        # as `cpr.PartialRecovery` does, which may resume the run; saves of older versions have none
        checkpointer.register(PROGRESS_STATE, self._progress, optional=True)
        self._saves = self._open_saves()

    def take_save_costs(self) -> Sequence[SaveCost | SaveEvent]:
        """Costs of the saves committed since the last call, and those begun and failed."""
        return self._saves.take_costs()

    def restore(self) -> None:
        """Load the newest state that verifies, if the run is resumed and has saved.

        Raises:
            CheckpointError: no state verifies, or the directory belongs to another run.
        """
        if self._resume:
            refuse_unsaved(self._checkpointer)
        if self._config.every_steps:
            self._checkpointer.claim()  # before the load, so that no other run saves in between
        if not (self._resume and self._load()):
            self._initialize(self._checkpointer)
        if self._config.every_steps:
            self._checkpointer.prepare()
        self._progress.steps_done = self._checkpointer.steps_done
        self._saves = self._open_saves()

    def step(self, samples: int) -> None:
        """Start a save when one is due.

        Raises:
            SaveFailedError: saves have failed for `checkpoint.give_up_after`; names the file.
        """
        self._progress.step(samples)
        self._saves.step()
        self._saves.save_if_due()

    @property
    def leaving_takes(self) -> timedelta:
        """`checkpoint.stop_within_s`, or 0 if the run does not save."""
        return timedelta(seconds=self._config.stop_within_s if self._config.every_steps else 0)

    def leave(self, spent: timedelta) -> bool:
        """Save if the remaining time allows it; `close` warns if it did not."""
        remaining_s = (self.leaving_takes - spent).total_seconds()
        is_saved = self._config.every_steps > 0 and self._saves.now(remaining_s)
        if is_saved:
            logger.info("saved at step %d before leaving", self._checkpointer.steps_done)
        return is_saved

    def save_end(self) -> None:
        """Save the trained state, unless that was done, and wait until the save is committed.

        Raises:
            SaveRefusedError: another run owns the directory.
        """
        if self._config.every_steps:
            with left_to_finish():
                self._saves.now(None)

    def finish(self) -> None:
        """Save the trained state if `save_end` has not, and mark the run as finished.

        Raises:
            SaveFailedError: saves have failed for `checkpoint.give_up_after`; names the file.
        """
        if self._config.every_steps:
            self._saves.finish()

    def close(self) -> None:
        """Release the checkpoint directory, and warn about steps that no save holds."""
        step, newest = self._checkpointer.steps_done, self._checkpointer.newest_step
        if self._config.every_steps and step != (newest or 0):
            warn_unsaved(step, newest)
        self._checkpointer.close(abandon=True)

    def _open_saves(self) -> Saves:
        """Periodic saves that count from the current step."""
        steps_done, saved_at = self._progress.steps_done, self._checkpointer.newest_step or 0
        pace = FixedPace(self._config.every_steps, steps_done=steps_done, saved_at=saved_at)
        moment, limit_s = self._config.moment, self._config.give_up_after_s
        return Saves(self._checkpointer, self._progress, pace, moment, give_up_after_s=limit_s)

    def _load(self) -> bool:
        """Load the newest save; False if there is none."""
        loaded = self._checkpointer.load(changes=self._changes)
        if loaded is None:
            logger.warning("nothing was saved yet: training starts from the beginning")
            return False
        logger.info(
            "resuming from save %d, step %d of %s (%s), read in %.1f s",
            loaded.state.sequence,
            loaded.state.step,
            loaded.state.newest.created,
            loaded.state.newest.moment,
            loaded.seconds,
        )
        if not loaded.same_ranks:
            logger.info(
                "the save was made by %s: random generators start over",
                count_text(loaded.state.newest.world_size, "rank"),
            )
        return True


@contextmanager
def left_to_finish() -> Iterator[None]:
    """Log a failed save of the block instead of raising: `finish` tries it again, after the evaluation.

    Raises:
        SaveRefusedError: another run owns the directory, so that no retry can help.
    """
    try:
        yield
    except SaveRefusedError:
        raise
    except SaveFailedError as error:
        if not dist.is_initialized() or dist.get_rank() == 0:  # all ranks have the same error
            logger.error("%s. The save is tried again after the evaluation", error)


def warn_unsaved(step: int, newest_step: int | None) -> None:
    """Warn that a run leaves at `step` although its newest save, if any, is from `newest_step`."""
    logger.warning(
        "not saved before leaving at step %d: %s",
        step,
        "there is no save" if newest_step is None else f"the newest save is from step {newest_step}",
    )
