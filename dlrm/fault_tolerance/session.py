"""The seam for fault tolerance: what the training loop asks of it, and two sessions.

`NoRecovery` saves nothing. `Checkpoints` saves everything now and then, and goes on from the newest state.
The third, `dlrm.fault_tolerance.recovery_session`, outlives its workers.
"""

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Protocol, cast

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.format.manifest import Moment
from cpr.estimator.history import SaveCost
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Recovery
from cpr.saving.cadence import FixedPace
from cpr.saving.periodic import Saves
from dlrm.config.schema import CheckpointConfig
from dlrm.telemetry.report import FailureReport

logger = logging.getLogger(__name__)


class Session(Protocol):
    """What a training loop holds to survive failures: the verbs of `cpr.PartialRecovery`, and a last word."""

    @property
    def batches_to_skip(self) -> int:
        """Batches at the position that are not to be trained on: somebody died in their middle."""

    def note_skipped(self) -> None:
        """One of them was taken from the data and left out."""

    @property
    def failures(self) -> FailureReport | None:
        """What the run went through; None if nobody keeps account of it."""

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """Those after failures, oldest first."""

    def take_save_costs(self) -> Sequence[SaveCost]:
        """What the saves took that were committed since this was last asked."""

    def restore(self) -> None:
        """Bring model and position back to where training goes on; called once, before the first step."""

    def step(self) -> None:
        """A step is complete on this rank: rows, dense parameters and data position belong together."""

    @property
    def leaving_takes(self) -> timedelta:
        """The longest that `leave` may take."""

    def leave(self, spent: timedelta) -> None:
        """Training is stopped from outside, on all ranks after the same step.

        Args:
            spent: time since it was asked for.
        """

    def save_end(self) -> None:
        """The last step is done, and only an evaluation is left: from here on, nothing of it can be lost."""

    def finish(self) -> None:
        """Training has reached its end."""

    def close(self) -> None:
        """Training is over, in whatever way; what is still under way is left unfinished."""


class NoRecovery:
    """Training without fault tolerance: a worker's death ends the run."""

    leaving_takes = timedelta(0)
    batches_to_skip = 0
    failures = None
    recoveries: Sequence[Recovery] = ()

    def take_save_costs(self) -> Sequence[SaveCost]:
        """None."""
        return ()

    def note_skipped(self) -> None:
        """Nothing: it does not come to this."""

    def restore(self) -> None:
        """Nothing: training begins at the beginning."""

    def step(self) -> None:
        """Nothing."""

    def leave(self, spent: timedelta) -> None:
        """Nothing."""

    def save_end(self) -> None:
        """Nothing."""

    def finish(self) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Checkpoints:
    """Full saves in the background, every so many steps, at the end, and before a stop if there is time.

    Args:
        checkpointer: everything that a resumed run needs is registered with it.
        config: when to save, and how.
        resume: whether the run goes on from what is saved.
        initialize: called where training begins at its beginning; may give the model other values.
    """

    batches_to_skip = 0
    failures = None
    recoveries: Sequence[Recovery] = ()

    def __init__(
        self,
        checkpointer: Checkpointer,
        config: CheckpointConfig,
        resume: bool,
        initialize: Callable[[Checkpointer], object],
    ) -> None:
        self._checkpointer = checkpointer
        self._config = config
        self._resume, self._initialize = resume, initialize
        self._course = RunProgress()
        self._saves = self._open_saves()
        self._is_last_word_said = True  # until there is something to lose
        self._loaded_step: int | None = None

    def take_save_costs(self) -> Sequence[SaveCost]:
        """What the saves took that were committed since this was last asked."""
        return self._saves.take_costs()

    def note_skipped(self) -> None:
        """Nothing: it does not come to this."""

    def restore(self) -> None:
        """Load the newest state that verifies, where the run is resumed and has saved.

        Raises:
            CheckpointError: there is none, or the directory is not this run's; says what to do.
        """
        if self._config.every_steps:
            self._checkpointer.claim()  # first, so that nobody saves between the two
        if not (self._resume and self._load()):
            self._initialize(self._checkpointer)
        if self._config.every_steps:
            self._checkpointer.prepare()
        self._course.steps_done = self._checkpointer.steps_done
        self._saves = self._open_saves()
        self._is_last_word_said = False

    def step(self) -> None:
        """Save when it is time.

        Raises:
            SaveFailedError: saves have failed for `checkpoint.give_up_after`; names the file.
        """
        self._course.step(samples=0)  # nobody asks for them
        self._saves.step()
        self._saves.save_if_due()

    @property
    def leaving_takes(self) -> timedelta:
        """The longest that `leave` may take."""
        return timedelta(seconds=self._config.stop_within_s if self._config.every_steps else 0)

    def leave(self, spent: timedelta) -> None:
        """Save if the remaining time allows it; `close` says if it did not."""
        remaining_s = (self.leaving_takes - spent).total_seconds()
        if self._has_trained and self._config.every_steps and self._saves.now(remaining_s):
            logger.info("saved at step %d before leaving", self._checkpointer.steps_done)
            self._is_last_word_said = True

    def save_end(self) -> None:
        """Save the end of the run, unless it was loaded, and wait until it is safe.

        Raises:
            SaveFailedError: it failed; names the file.
        """
        if self._has_trained and self._config.every_steps:
            self._saves.now(None)
        self._is_last_word_said = True

    def finish(self) -> None:
        """Save the end of the run, unless that was done, and record that it has finished."""
        self.save_end()
        if self._config.every_steps:
            self._checkpointer.finish()

    def close(self) -> None:
        """Let go of the directory, and say what is lost."""
        step, newest = self._checkpointer.steps_done, self._checkpointer.newest_step
        if self._config.every_steps and not self._is_last_word_said and step != (newest or 0):
            logger.warning(
                "not saved before leaving at step %d: %s",
                step,
                "there is no save" if newest is None else f"the newest save is from step {newest}",
            )
        self._checkpointer.close(abandon=True)

    @property
    def _has_trained(self) -> bool:
        """Whether there is more than the save that was loaded."""
        return self._checkpointer.steps_done != self._loaded_step

    def _open_saves(self) -> Saves:
        """Those that follow where training is now."""
        steps_done, saved_at = self._course.steps_done, self._checkpointer.newest_step or 0
        pace = FixedPace(self._config.every_steps, steps_done=steps_done, saved_at=saved_at)
        moment, limit_s = cast("Moment", self._config.moment), self._config.give_up_after_s
        return Saves(self._checkpointer, self._course, pace, moment, give_up_after_s=limit_s)

    def _load(self) -> bool:
        """Whether there was anything to load."""
        loaded = self._checkpointer.load()
        if loaded is None:
            logger.warning("nothing was saved yet: training begins at the beginning")
            return False
        self._loaded_step = loaded.state.step
        logger.info(
            "going on from save %d, step %d of %s (%s), read in %.1f s",
            loaded.state.sequence,
            loaded.state.step,
            loaded.state.newest.created,
            loaded.state.newest.moment,
            loaded.seconds,
        )
        if not loaded.same_ranks:
            logger.info(
                "it was saved by %d ranks: random generators start anew", loaded.state.newest.world_size
            )
        return True
