"""The saves of a run: periodic ones, of which some may fail, and the last one, which may not."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.copier import seconds_left
from cpr.checkpoint.manifest import Moment
from cpr.checkpoint.saver import Save
from cpr.errors import SaveFailedError
from cpr.estimator.history import RunHistory
from cpr.recovery.course import Course
from cpr.recovery.diary import Diary
from cpr.recovery.pace import Pace
from cpr.recovery.row_saves import RowSaves

FAILED_SAVES_IN_A_ROW: Final = 3
"""So many make training stop: what it does could not be kept."""
POSTPONED_STEPS: Final = 8
"""How often a row save that is due while another save is under way is tried again."""
POLL_S: Final = 0.1
"""How often the last save is asked for again where a busy checkpointer skips saves."""

logger = logging.getLogger(__name__)


class Saves:
    """Saves now and then, and at the end.

    Periodic saves hold everything, or the rows that deserve it most; the last save, and one that is wanted
    now, always hold everything.

    Args:
        checkpointer: that saves.
        course: of the run; is told of each save, before it is copied beside the tables.
        pace: says when the periodic ones are due.
        moment: of the periodic ones that hold everything.
        rows: chooses rows; None: everything is saved each time.
        diary: is told of each save.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        course: Course,
        pace: Pace,
        moment: Moment,
        rows: RowSaves | None = None,
        diary: Diary | None = None,
    ) -> None:
        self._checkpointer, self._course = checkpointer, course
        self._pace, self._moment, self._diary, self._rows = pace, moment, diary, rows
        self._is_due = False
        self._postponed_to: int | None = None
        self._saved_at = -1
        """Training steps done when everything was saved last; -1: never, or nobody knows that it worked."""
        self._num_failed = 0
        self._newest_at_failure: int | None = None

    @property
    def history(self) -> RunHistory | None:
        """What the run has measured so far, where it is kept: on rank 0."""
        return self._diary.history if self._diary is not None else None

    def step(self) -> None:
        """A training step is complete.

        Raises:
            SaveFailedError: saves failed again and again; names the file.
        """
        with self._tolerated():
            self._checkpointer.step()
        if self._diary is not None:
            self._diary.step()
        if self._rows is not None:
            self._rows.step()
        steps_done = self._course.steps_done
        self._is_due = self._pace.is_due(steps_done) or steps_done == self._postponed_to
        if self._is_due and self._rows is not None:
            self._postpone_if_busy(self._rows)
        if self._is_due:
            self._note()

    def save_if_due(self) -> None:
        """Begin a save if it is time; after the step's state is safe in memory.

        Raises:
            SaveFailedError: as `step`.
        """
        if self._is_due:
            with self._tolerated():
                self._save_some()

    def now(self, timeout_s: float | None) -> bool:
        """Save this moment, unless that was done, and wait until it is safe; the same answer on all ranks.

        Args:
            timeout_s: give it up if it takes longer, which is no failure; None: never. The shortest of all
                ranks counts.

        Returns:
            Whether it is safe.

        Raises:
            SaveFailedError: it failed.
        """
        timeout_s = self._shortest(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._saved_at != self._course.steps_done and timeout_s != 0 and self._let_last_end(deadline):
            self._save_moment(seconds_left(deadline))
        if self._saved_at != self._course.steps_done:
            return False
        with self._doubted():
            is_saved = self._checkpointer.wait(seconds_left(deadline))
        if not is_saved:
            self._saved_at = -1
        return is_saved

    def finish(self) -> None:
        """Save the end of the run, unless that was done, and wait until it is safe; lets go of the directory.

        Raises:
            SaveFailedError: it failed.
        """
        if self._course.steps_done not in {0, self._saved_at}:
            self._let_last_end()  # or the last save may be skipped
            self._save_moment()
            while self._saved_at != self._course.steps_done:  # skipped, on all ranks alike
                time.sleep(POLL_S)
                self._save_moment()
        try:
            with self._doubted():
                self._checkpointer.wait_until_idle()
            if self._course.steps_done:  # before any memory is freed: workers that return must learn of it
                self._checkpointer.finish(self._course.samples_done)
        finally:
            if self._diary is not None:
                self._diary.finish()
            self._checkpointer.close()

    def _postpone_if_busy(self, rows: RowSaves) -> None:
        """Row saves are many, and training waits for none; what they leave out is in the next."""
        with self._tolerated():
            self._is_due = rows.get_ready()
        self._postponed_to = None if self._is_due else self._course.steps_done + POSTPONED_STEPS

    def _note(self) -> None:
        if self._rows is None:
            self._course.note_save()
        else:
            self._rows.note()

    def _shortest(self, timeout_s: float | None) -> float | None:
        """Of the timeouts of all ranks, whose clocks began at different times; None: none has one."""
        given = [each for each in self._checkpointer.agreement.gather(timeout_s) if each is not None]
        return max(0.0, min(given)) if given else None

    def _let_last_end(self, deadline: float | None = None) -> bool:
        """Wait for the save before one that may be the last; if it has failed, that is only told.

        Returns:
            Whether it is over; the same on all ranks.
        """
        is_free = True  # where that is told by an error
        with self._saved_again():
            self._checkpointer.wait_until_idle(deadline)
        with self._saved_again():
            is_free = self._checkpointer.is_free()
        if is_free and self._rows is not None:
            self._rows.note_outcome()
        return is_free

    def _save_moment(self, timeout_s: float | None = None) -> None:
        """Begin to save everything as it is now, at a moment that counts."""
        self._course.note_save()
        self._save_all("consistent", timeout_s)

    def _save_some(self) -> None:
        if self._rows is None or self._rows.needs_base:
            self._save_all(self._moment)
        else:
            self._tell(self._rows.save())

    def _save_all(self, moment: Moment, timeout_s: float | None = None) -> None:
        begin = self._checkpointer.save if self._rows is None else self._rows.save_all
        save = None
        try:
            save = begin(moment, timeout_s=timeout_s)
        finally:
            if save is None:  # skipped or failed, on all ranks alike
                self._course.forget_save(self._course.steps_done)
        if save is not None:
            self._saved_at = self._course.steps_done
        self._tell(save)

    def _tell(self, save: Save | None) -> None:
        if save is not None and self._diary is not None:
            self._diary.note_save(save)

    @contextmanager
    def _saved_again(self) -> Iterator[None]:
        """A save that fails here is only told."""
        try:
            yield
        except SaveFailedError as error:
            logger.error("%s. Everything is saved again now", error)  # the trace says nothing more

    @contextmanager
    def _doubted(self) -> Iterator[None]:
        """If the block fails, this moment is not saved: whoever wants it saved again gets another save."""
        try:
            yield
        except SaveFailedError:
            self._saved_at = -1
            raise

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
