"""When a save is tried again after one has failed: later and later, while training goes on.

Ranks learn what became of a save after different steps, and must try again after the same one. So they tell
each other what they know, some steps after a save has begun, and then less and less often until it is over.
Rank 0 decides what follows from a failure; its clock counts.
"""

import logging
import time
from typing import Final

from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.save.writer_thread import Save
from cpr.errors import SaveFailedError, SaveRefusedError
from cpr.humanize import duration_text

FIRST_LOOK_STEPS: Final = 8
"""After a save has begun, until ranks ask each other what became of it."""
LOOK_FACTOR: Final = 4
"""How many times as many steps after its beginning they ask again if it is still under way."""
FIRST_PAUSE_S: Final = 10.0
"""After a save has failed, until the next is tried; twice as long after each that fails in a row."""
LONGEST_PAUSE_S: Final = 600.0

logger = logging.getLogger(__name__)


class Retries:
    """Knows on all ranks alike whether saves fail, and when the next one is tried.

    Args:
        group: all ranks, in the thread that trains.
        give_up_after_s: for how long saves may fail before that is an error; None: for ever.
    """

    def __init__(self, group: RankGroup, give_up_after_s: float | None = None) -> None:
        self._group, self._give_up_after_s = group, give_up_after_s
        self._num_failed = 0
        self._failing_since = 0.0
        self._save: Save | None = None
        """Of which not all ranks know yet what became of it."""
        self._began: tuple[int, float] | None = None
        """The same, when the newest save began."""
        self._clock: tuple[int, float] | None = None
        """Training steps done, and the time, when this was called first: tells how long a step takes."""
        self._look_at = 0
        self._retry_at: int | None = None

    @property
    def is_failing(self) -> bool:
        """Whether the newest save has failed: then the next one is due when `is_due` says so."""
        return self._num_failed > 0

    def is_due(self, steps_done: int) -> bool:
        """Whether a save is tried again after this step."""
        return steps_done == self._retry_at

    def begin(self, save: Save, steps_done: int) -> None:
        """A save has begun after this step, on all ranks."""
        self._save, self._retry_at = save, None
        self._began = (steps_done, time.monotonic())
        self._look_at = steps_done + FIRST_LOOK_STEPS

    def will_tell(self, error: SaveFailedError) -> bool:
        """Whether `look` is going to tell of this error, which one rank has met alone."""
        return self._save is not None and self._save.error is error and self._save.manifest is None

    def take_untold(self) -> SaveFailedError | None:
        """Why the last save has failed, if nobody was told; on all ranks, when it is over on all of them."""
        save, self._save = self._save, None
        if save is None or not isinstance(save.outcome, SaveFailedError):
            return None
        return save.outcome

    def look(self, steps_done: int, *, at_once: bool = False) -> int | None:
        """See what became of the last save, if it is time to; called by all ranks after each step.

        Args:
            steps_done: training steps done.
            at_once: it is time, because the next one is due.

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
        elif self.is_failing:  # it was given up, or whoever wanted it was told: nobody waits for it any more
            self._retry_at = steps_done + 1
        return None

    def note_success(self) -> None:
        """A save is committed; called by all ranks."""
        self._save, self._num_failed = None, 0

    def note_failure(self, error: SaveFailedError, steps_done: int) -> None:
        """A save has failed, or could not begin; called by all ranks.

        Raises:
            SaveFailedError: saves have failed for too long, or another run owns the directory.
        """
        save, self._save = self._save, None
        if save is not None:
            save.is_excused = True  # a rank that hears of it later need not tell
        if isinstance(error, SaveRefusedError):
            raise error
        self._num_failed += 1
        mine = self._decide(steps_done) if self._group.rank == 0 else None
        failing_s, pause_s, pause_steps = self._group.broadcast(mine)
        if self._give_up_after_s is not None and failing_s >= self._give_up_after_s:
            raise SaveFailedError(
                f"{error}. Saves have failed for {duration_text(failing_s)}, and give_up_after is "
                f"{duration_text(self._give_up_after_s)}"
            )
        self._retry_at = steps_done + pause_steps
        if self._group.rank == 0:
            logger.error(
                "%s. Training goes on; the save is tried again after step %d, in about %s%s",
                error,
                self._retry_at,
                duration_text(pause_s),
                f" (saves have failed for {duration_text(failing_s)})" if self._num_failed > 1 else "",
            )

    def _decide(self, steps_done: int) -> tuple[float, float, int]:
        """Seconds since saves fail, and the pause until the next one, in seconds and steps."""
        now = time.monotonic()
        anchors = [each for each in (self._began, self._clock) if each is not None and each[0] < steps_done]
        if self._num_failed == 1:
            self._failing_since = now
        failing_s = now - self._failing_since
        pause_s = min(FIRST_PAUSE_S * 2 ** min(self._num_failed - 1, 16), LONGEST_PAUSE_S)
        if self._give_up_after_s is not None:
            pause_s = min(pause_s, max(0.0, self._give_up_after_s - failing_s))  # a last try just before
        if not anchors:  # nobody knows yet how long a step takes
            return failing_s, pause_s, FIRST_LOOK_STEPS
        step, began = anchors[0]
        return failing_s, pause_s, max(1, round(pause_s * (steps_done - step) / (now - began)))
