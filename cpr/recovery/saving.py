"""The saves of a run: periodic ones, of which some may fail, and the last one, which may not."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.copier import seconds_left
from cpr.checkpoint.manifest import Moment
from cpr.errors import SaveFailedError
from cpr.recovery.course import Course

FAILED_SAVES_IN_A_ROW: Final = 3
"""So many make training stop: what it does could not be kept."""
POLL_S: Final = 0.1
"""How often the last save is asked for again where a busy checkpointer skips saves."""

logger = logging.getLogger(__name__)


class Saves:
    """Saves everything now and then.

    Args:
        checkpointer: that saves.
        course: of the run; is told of each save, before it is copied beside the tables.
        every: steps from one save to the next; 0: only the last.
        moment: of the periodic ones.
    """

    def __init__(self, checkpointer: Checkpointer, course: Course, every: int, moment: Moment) -> None:
        self._checkpointer, self._course = checkpointer, course
        self._every, self._moment = every, moment
        self._saved_at = -1
        self._num_failed = 0
        self._newest_at_failure: int | None = None

    def step(self) -> None:
        """A training step is complete.

        Raises:
            SaveFailedError: saves failed again and again; names the file.
        """
        if self._is_due:
            self._course.note_save()
        with self._tolerated():
            self._checkpointer.step()

    def save_if_due(self) -> None:
        """Begin a save if it is time; after the step's state is safe in memory.

        Raises:
            SaveFailedError: as `step`.
        """
        if self._is_due:
            with self._tolerated():
                self._save(self._moment)

    def now(self, timeout_s: float) -> bool:
        """Save this moment, unless that was done, and wait until it is safe; whether it is.

        Args:
            timeout_s: give it up if it takes longer.

        Raises:
            SaveFailedError: it failed.
        """
        deadline = time.monotonic() + timeout_s
        if self._saved_at != self._course.steps_done:
            self._course.note_save()
            self._save("consistent", timeout_s)
        is_committed = self._checkpointer.wait(seconds_left(deadline))
        return is_committed and self._saved_at == self._course.steps_done

    def finish(self) -> None:
        """Save the end of the run, unless that was done, and wait until it is safe; lets go of the directory.

        Raises:
            SaveFailedError: it failed.
        """
        if self._course.steps_done not in {0, self._saved_at}:
            with self._tolerated():
                self._checkpointer.wait()  # or the last save may be skipped
            self._course.note_save()
            self._save("consistent")
            while self._saved_at != self._course.steps_done:  # skipped, on all ranks alike
                time.sleep(POLL_S)
                self._save("consistent")
        self._checkpointer.close()

    @property
    def _is_due(self) -> bool:
        return self._every > 0 and self._course.steps_done % self._every == 0

    def _save(self, moment: Moment, timeout_s: float | None = None) -> None:
        if self._checkpointer.save(moment, timeout_s=timeout_s) is not None:
            self._saved_at = self._course.steps_done

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """A save that fails is told, and tried again at the next one's time; training goes on for a while."""
        try:
            yield
        except SaveFailedError as error:
            self._num_failed += 1
            self._newest_at_failure = self._checkpointer.newest_step
            if self._num_failed >= FAILED_SAVES_IN_A_ROW:
                raise
            logger.error(  # the trace says nothing more
                "%s. Training goes on, and the next save is tried when it is due", error
            )
        else:
            if self._checkpointer.newest_step != self._newest_at_failure:  # one has succeeded since
                self._num_failed = 0
