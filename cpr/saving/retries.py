"""Retries of failed saves, with growing pauses while training continues.

Ranks learn the outcome of a save after different steps, and must try again after the same one. So they
exchange outcomes some steps after a save has begun, and then less and less often until it is over. Rank 0
decides how long to wait; its clock counts.
"""

import logging
import time
from typing import Final

from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.save.writer_thread import Save
from cpr.errors import CheckpointError, SaveFailedError, SaveRefusedError
from cpr.humanize import duration_text

FIRST_LOOK_STEPS: Final = 8
"""Steps from the beginning of a save until ranks first exchange its outcome."""
LOOK_FACTOR: Final = 4
"""While the save is under way, they exchange again after so many times as many steps."""
FIRST_PAUSE_S: Final = 10.0
"""Pause after a failed save; it doubles with each failure in a row."""
LONGEST_PAUSE_S: Final = 600.0
LONGEST_LAST_PAUSE_S: Final = 60.0
"""At the end of training nothing else happens during a pause, and a try disturbs nothing."""

logger = logging.getLogger(__name__)


class Retries:
    """Tells, equally on all ranks, whether saves fail, and when the next one is tried.

    Args:
        group: all ranks, in the thread that trains.
        give_up_after_s: how long saves may fail before that is an error; None: without a limit.
    """

    def __init__(self, group: RankGroup, give_up_after_s: float | None = None) -> None:
        self._group, self._give_up_after_s = group, give_up_after_s
        self._num_failed = 0
        self._failing_since = self._failing_s = 0.0
        self._save: Save | None = None
        """The save whose outcome not all ranks know yet."""
        self._began: tuple[int, float] | None = None
        """Training steps done, and the time, when the newest save began."""
        self._clock: tuple[int, float] | None = None
        """Training steps done, and the time, at the first call: from these follows how long a step takes."""
        self._look_at = 0
        self._retry_at: int | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the newest save has failed: then `is_due` decides about the next one."""
        return self._num_failed > 0

    def is_due(self, steps_done: int) -> bool:
        """Whether a save is tried again after this step."""
        return steps_done == self._retry_at

    def begin(self, save: Save, steps_done: int) -> None:
        """Watch a save that has begun after this step, on all ranks."""
        self._save, self._retry_at = save, None
        self._began = (steps_done, time.monotonic())
        self._look_at = steps_done + FIRST_LOOK_STEPS

    def will_report(self, error: SaveFailedError) -> bool:
        """Whether `look` is going to report this error, which so far only this rank knows."""
        return self._save is not None and self._save.error is error and self._save.manifest is None

    def take_unreported(self) -> SaveFailedError | None:
        """Return the error of the last save, once; on all ranks, when the save is over on all of them."""
        save, self._save = self._save, None
        if save is None or not isinstance(save.outcome, SaveFailedError):
            return None
        return save.outcome

    def look(self, steps_done: int, *, at_once: bool = False) -> int | None:
        """Exchange the outcome of the last save, if it is time to; called by all ranks after each step.

        Args:
            steps_done: training steps done.
            at_once: exchange now, because the next save is due.

        Returns:
            The step of a save that has failed, once; None: none has.

        Raises:
            SaveFailedError: saves have failed for too long, or another run owns the directory.
        """
        self._clock = self._clock or (steps_done, time.monotonic())
        save, began = self._save, self._began
        if save is None or began is None or not (at_once or steps_done >= self._look_at):
            return None
        step = began[0]
        outcomes = self._group.gather(save.outcome if save.done else None)
        for outcome in outcomes:
            if isinstance(outcome, SaveFailedError):
                self.note_failure(outcome, steps_done)
                return step
        if None in outcomes:
            self._look_at = max(self._look_at, step + LOOK_FACTOR * (steps_done - step))
            return None
        self._save = None
        if True in outcomes:
            self.note_success()
        elif self.is_failing:  # it was given up, or its error was raised where it was requested
            self._retry_at = steps_done + 1
        return None

    def note_success(self) -> None:
        """Record that a save is committed; called by all ranks."""
        self._save, self._num_failed = None, 0

    def note_failure(self, error: SaveFailedError, steps_done: int) -> None:
        """Record that a save has failed, or could not begin, and plan the next; called by all ranks.

        Raises:
            SaveFailedError: saves have failed for too long, or another run owns the directory.
        """
        save, self._save = self._save, None
        if save is not None:
            save.is_excused = True  # a rank that learns of it later need not report it
        pause_s, pause_steps = self._count(error, steps_done)
        self._retry_at = steps_done + pause_steps
        self._log(
            error, f"Training continues; the save is tried again after step {self._retry_at}, in", pause_s
        )

    def pause(self, error: CheckpointError) -> None:
        """Record a failure at the end of training, and wait until the next try; called by all ranks.

        Raises:
            SaveFailedError: saves have failed for too long, or another run owns the directory.
        """
        self._save = None
        pause_s = min(self._count(error)[0], LONGEST_LAST_PAUSE_S)
        self._log(error, "Training is over; the last save is tried again in", pause_s)
        time.sleep(pause_s)

    def _count(self, error: CheckpointError, steps_done: int = 0) -> tuple[float, int]:
        """Count a failure; returns the pause until the next save in seconds and in steps, as on all ranks."""
        if isinstance(error, SaveRefusedError):
            raise error
        self._num_failed += 1
        mine = self._decide(steps_done) if self._group.rank == 0 else None
        self._failing_s, pause_s, pause_steps = self._group.broadcast(mine)
        if self._give_up_after_s is not None and self._failing_s >= self._give_up_after_s:
            raise SaveFailedError(
                f"{error}. Saves have failed for {duration_text(self._failing_s)}, and give_up_after is "
                f"{duration_text(self._give_up_after_s)}"
            )
        return pause_s, pause_steps

    def _decide(self, steps_done: int) -> tuple[float, float, int]:
        """Seconds since saves fail, and the pause until the next save in seconds and in steps."""
        now = time.monotonic()
        anchors = [each for each in (self._began, self._clock) if each is not None and each[0] < steps_done]
        if self._num_failed == 1:
            self._failing_since = now
        failing_s = now - self._failing_since
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self._num_failed - 1, 16), LONGEST_PAUSE_S)
        if self._give_up_after_s is not None:
            pause_s = min(pause_s, max(0.0, self._give_up_after_s - failing_s))  # a last try just before
        if not anchors:  # how long a step takes is not known yet
            return failing_s, pause_s, FIRST_LOOK_STEPS
        step, began = anchors[0]
        return failing_s, pause_s, max(1, round(pause_s * (steps_done - step) / (now - began)))

    def _log(self, error: CheckpointError, what_next: str, pause_s: float) -> None:
        if self._group.rank == 0:
            logger.error(
                "%s. %s about %s%s",
                error,
                what_next,
                duration_text(pause_s),
                f" (saves have failed for {duration_text(self._failing_s)})" if self._num_failed > 1 else "",
            )
