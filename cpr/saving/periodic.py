"""The saves of a run: periodic ones and the last one, each repeated after a failure."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.save.stager import seconds_left
from cpr.checkpoint.save.writer_thread import Save
from cpr.errors import CheckpointError, LockedError, MismatchError, SaveFailedError
from cpr.estimator.history import RunHistory, SaveCost
from cpr.recovery.run.progress import RunProgress
from cpr.saving.cadence import Pace
from cpr.saving.history_writer import HistoryWriter
from cpr.saving.retries import Retries
from cpr.saving.row_saves import RowSaves

POSTPONED_STEPS: Final = 8
"""Steps until a row save that was due while another save was under way is tried again."""
COSTS_KEPT: Final = 256
"""Number of newest saves whose costs `take_costs` can return."""
POLL_S: Final = 0.1
"""Pause before the last save is tried again, where a busy checkpointer skips saves."""

logger = logging.getLogger(__name__)


class Saves:
    """Saves periodically, on request, and at the end.

    Periodic saves hold everything, or the most important rows; all others hold everything.

    Args:
        checkpointer: writes the saves.
        progress: of the run; counts each save, before it is published in shared memory.
        pace: decides when periodic saves are due.
        moment: of full periodic saves.
        rows: chooses rows; None: all periodic saves are full.
        writer: of the history; on rank 0.
        give_up_after_s: how long periodic saves may fail before training ends; None: without a limit.
    """

    def __init__(
        self,
        checkpointer: Checkpointer,
        progress: RunProgress,
        pace: Pace,
        moment: Moment,
        rows: RowSaves | None = None,
        writer: HistoryWriter | None = None,
        give_up_after_s: float | None = None,
    ) -> None:
        self._checkpointer, self._progress = checkpointer, progress
        self._pace, self._moment, self._writer, self._rows = pace, moment, writer, rows
        self._is_due = False
        self._postponed_to: int | None = None
        self._saved_at = checkpointer.saved_moment
        """Training steps done at the newest save of one moment; None: there is none, or it has failed."""
        self._retries = Retries(checkpointer.agreement, give_up_after_s)
        self._begun: deque[tuple[int, Save]] = deque()
        self._costs: deque[SaveCost] = deque(maxlen=COSTS_KEPT)

    @property
    def history(self) -> RunHistory | None:
        """Measured costs so far, on rank 0."""
        return self._writer.history if self._writer is not None else None

    def take_costs(self) -> list[SaveCost]:
        """Return the costs of the saves committed since the last call, oldest first."""
        self._note_costs()
        taken = list(self._costs)
        self._costs.clear()
        return taken

    @property
    def are_failing(self) -> bool:
        """Whether the newest save whose outcome is known has failed."""
        return self._retries.is_failing

    def step(self) -> None:
        """Complete a training step, and decide whether a save is due.

        Raises:
            SaveFailedError: saves have failed for too long; names the file.
        """
        with self._logged():
            self._checkpointer.step()
        self._note_costs()
        if self._writer is not None:
            self._writer.step()
        if self._rows is not None:
            self._rows.step()
        self._is_due = self._ask_whether_due(self._progress.steps_done)
        if self._is_due and self._rows is not None:
            self._postpone_if_busy(self._rows)
        if self._is_due:
            self._note()

    def save_if_due(self) -> None:
        """Begin a save if one is due; called after the state of the step was published.

        Raises:
            SaveFailedError: as `step`.
        """
        if self._is_due:
            try:
                self._save_some()
            except SaveFailedError as error:
                self._retries.note_failure(error, self._progress.steps_done)

    def now(self, timeout_s: float | None) -> bool:
        """Save this moment, unless that was done, and wait until the save is durable.

        Args:
            timeout_s: give up if the save takes longer, which is no failure; None: no limit. The shortest of
                all ranks counts.

        Returns:
            Whether this moment is saved; the same on all ranks.

        Raises:
            SaveFailedError: the save failed.
        """
        timeout_s = self._shortest(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._saved_at != self._progress.steps_done and timeout_s != 0 and self._let_last_end(deadline):
            self._save_moment(seconds_left(deadline))
        if self._saved_at != self._progress.steps_done:
            return False
        with self._forgotten_on_failure():
            is_saved = self._checkpointer.wait(seconds_left(deadline))
        if is_saved:
            self._retries.note_success()
        else:
            self._saved_at = None
        return is_saved

    def finish(self, before_retry: Callable[[], object] = lambda: None) -> None:
        """Save the end of the run, unless that was done, mark the run as finished, and release the directory.

        Failures are repaired by time alone here, as nothing is left to train: what fails is tried again after
        pauses of 10 s to 1 min.

        Args:
            before_retry: called after each failure, before the pause.

        Raises:
            SaveFailedError: saves have failed for too long, or another run owns the directory.
        """
        try:
            while not self._finish_once(before_retry):
                pass
        finally:
            if self._writer is not None:
                self._writer.finish()
            self._checkpointer.close()

    def _finish_once(self, before_retry: Callable[[], object]) -> bool:
        """Try to save the end of the run and to mark it as finished; returns whether both are durable."""
        try:
            if self._progress.steps_done not in {0, self._saved_at}:
                self._let_last_end()  # or the last save may be skipped
                self._save_moment()
            with self._forgotten_on_failure():
                self._checkpointer.wait()
            with self._logged():
                self._checkpointer.wait_until_idle()
            if self._progress.steps_done not in {0, self._saved_at}:  # skipped, on all ranks alike
                time.sleep(POLL_S)
                return False
            if self._progress.steps_done:
                # before memory is freed: workers that return must learn that the run has finished
                self._checkpointer.finish()
        except (LockedError, MismatchError):
            raise  # no pause repairs these
        except CheckpointError as error:
            before_retry()
            self._retries.pause(error)
            return False
        return True

    def _ask_whether_due(self, steps_done: int) -> bool:
        """Whether a periodic save is due after this step; the same on all ranks."""
        is_postponed = steps_done == self._postponed_to
        is_due = self._pace.is_due(steps_done) or is_postponed
        failed = self._retries.look(steps_done, at_once=is_due)
        if failed is not None:
            self._progress.forget_save(failed)
        if self._retries.is_failing:
            return is_postponed or self._retries.is_due(steps_done)
        return is_due

    def _postpone_if_busy(self, rows: RowSaves) -> None:
        """Postpone a row save while another save is under way, because training must not wait for it."""
        is_free = True  # stays so if an error tells it
        with self._logged():
            is_free = rows.get_ready()
        if not is_free:
            self._is_due = False
            self._postpone()
        elif (error := self._retries.take_unreported()) is not None:
            self._is_due = False
            self._retries.note_failure(error, self._progress.steps_done)

    def _postpone(self) -> None:
        self._postponed_to = self._progress.steps_done + POSTPONED_STEPS

    def _note(self) -> None:
        if self._rows is None:
            self._progress.note_save()
        else:
            self._rows.note()

    def _shortest(self, timeout_s: float | None) -> float | None:
        """The shortest timeout of all ranks, whose clocks began at different times; None: none has one."""
        given = [each for each in self._checkpointer.agreement.gather(timeout_s) if each is not None]
        return max(0.0, min(given)) if given else None

    def _let_last_end(self, deadline: float | None = None) -> bool:
        """Wait for the previous save before one that may be the last; its failure is only logged.

        Returns:
            Whether it is over; the same on all ranks.
        """
        is_free = True  # stays so if an error tells it
        with self._logged():
            self._checkpointer.wait_until_idle(deadline)
        with self._logged():
            is_free = self._checkpointer.is_free()
        if is_free and (error := self._retries.take_unreported()) is not None:
            self._log_error(f"{error}. Everything is saved again now")
        if is_free and self._rows is not None:
            self._rows.note_outcome()
        return is_free

    def _save_moment(self, timeout_s: float | None = None) -> None:
        """Begin a full save of this moment."""
        self._progress.note_save()
        self._save_all("consistent", timeout_s)

    def _save_some(self) -> None:
        if self._rows is None or self._rows.needs_base:
            self._save_all(self._moment)
        else:
            self._watch(self._rows.save())

    def _save_all(self, moment: Moment, timeout_s: float | None = None) -> None:
        begin = self._checkpointer.save if self._rows is None else self._rows.save_all
        save = None
        try:
            save = begin(moment, timeout_s=timeout_s)
        finally:
            if save is None:  # skipped or failed, on all ranks alike
                self._progress.forget_save(self._progress.steps_done)
        if save is not None:
            self._saved_at = self._progress.steps_done
        self._watch(save)

    def _watch(self, save: Save | None) -> None:
        if save is None:
            if self._retries.is_failing:
                self._postpone()
            return
        self._retries.begin(save, self._progress.steps_done)
        self._begun.append((self._progress.steps_done, save))
        if self._writer is not None:
            self._writer.note_save(save)

    def _note_costs(self) -> None:
        while self._begun and self._begun[0][1].done:
            step, save = self._begun.popleft()
            if save.manifest is not None and save.seconds is not None:
                self._costs.append(
                    SaveCost(
                        step=step,
                        kind=save.kind,
                        num_bytes=save.manifest.num_bytes,
                        blocked_s=max(save.blocked_s, save.longest_blocked_s),
                        seconds=save.seconds,
                    )
                )

    def _log_error(self, text: str) -> None:
        """Log once, and not on every rank, because the rank tells nothing more."""
        if self._checkpointer.agreement.rank == 0:
            logger.error("%s", text)

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log a failed save, unless `Retries.look` will report it on all ranks."""
        try:
            yield
        except SaveFailedError as error:
            if not self._retries.will_report(error):
                self._log_error(f"{error}. Training continues")

    @contextmanager
    def _forgotten_on_failure(self) -> Iterator[None]:
        """If the block fails, this moment counts as not saved, so that the next request saves it again."""
        try:
            yield
        except SaveFailedError:
            self._saved_at = None
            raise
