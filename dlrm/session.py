"""The seam for fault tolerance: what the training loop asks of it, and two sessions.

`NoRecovery` saves nothing. `Checkpoints` saves everything now and then, and goes on from the newest state.
The third, `dlrm.recovering`, outlives its workers.
"""

import logging
import time
from datetime import timedelta
from typing import Protocol, cast

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.manifest import Moment
from dlrm.config import CheckpointConfig
from dlrm.report import FailureReport

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
    """

    batches_to_skip = 0
    failures = None

    def __init__(self, checkpointer: Checkpointer, config: CheckpointConfig, resume: bool) -> None:
        self._checkpointer = checkpointer
        self._config = config
        self._resume = resume
        self._moment = cast("Moment", config.moment)
        self._saved_at = -1
        self._is_last_word_said = True  # until there is something to lose

    def note_skipped(self) -> None:
        """Nothing: it does not come to this."""

    def restore(self) -> None:
        """Load the newest state that verifies, where the run is resumed.

        Raises:
            CheckpointError: there is none, or the directory is not this run's; says what to do.
        """
        if self._config.every_steps:
            self._checkpointer.claim()  # first, so that nobody saves between the two
        if self._resume:
            self._load()
        if self._config.every_steps:
            self._checkpointer.prepare()
        self._is_last_word_said = False

    def step(self) -> None:
        """Save when it is time.

        Raises:
            SaveFailedError: a save failed in the background; names the file.
        """
        self._checkpointer.step()
        every = self._config.every_steps
        if every and self._checkpointer.steps_done % every == 0:
            self._save(self._moment)

    @property
    def leaving_takes(self) -> timedelta:
        """The longest that `leave` may take."""
        return timedelta(seconds=self._config.stop_within_s if self._config.every_steps else 0)

    def leave(self, spent: timedelta) -> None:
        """Save if the remaining time allows it; `close` says if it did not."""
        deadline = time.monotonic() + (self.leaving_takes - spent).total_seconds()
        if self._config.every_steps == 0 or time.monotonic() >= deadline:
            return
        step = self._checkpointer.steps_done
        if self._saved_at != step:
            self._save("consistent", deadline - time.monotonic())
        if self._checkpointer.wait(max(0.0, deadline - time.monotonic())) and self._saved_at == step:
            logger.info("saved at step %d before leaving", step)
            self._is_last_word_said = True

    def save_end(self) -> None:
        """Save the end of the run, and wait until it is safe.

        Raises:
            SaveFailedError: it failed; names the file.
        """
        if self._config.every_steps and self._saved_at != self._checkpointer.steps_done:
            self._save("consistent")
        self._checkpointer.wait()
        self._is_last_word_said = True

    def finish(self) -> None:
        """Save the end of the run, unless that was done."""
        self.save_end()

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

    def _save(self, moment: Moment, timeout_s: float | None = None) -> None:
        save = self._checkpointer.save(moment, timeout_s=timeout_s)
        if save is not None and moment == "consistent":
            self._saved_at = self._checkpointer.steps_done

    def _load(self) -> None:
        loaded = self._checkpointer.load()
        if loaded is None:
            logger.warning("nothing was saved yet: training begins at the beginning")
            return
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
