"""The saves of a run: periodic ones and the last one, each repeated after a failure.

`Retries` repeats failed saves, with growing pauses while training continues. Ranks learn the outcome of a
save after different steps, and must try again after the same one. So they exchange outcomes some steps after
a save has begun, and then less and less often until it is over. Rank 0 decides how long to wait; its clock
counts.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cpr.checkpoint.checkpointer import Checkpointer
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.format.manifest import Moment
from cpr.checkpoint.save.stager import seconds_left
from cpr.checkpoint.save.writer_thread import Save
from cpr.errors import CheckpointError, LockedError, MismatchError, SaveFailedError, SaveRefusedError
from cpr.estimator.history import RunHistory, SaveCost, SaveEvent
from cpr.humanize import duration_text
from cpr.recovery.run.progress import RunProgress
from cpr.saving.cadence import Pace
from cpr.saving.history_writer import HistoryWriter
from cpr.saving.row_saves import RowSaves

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
        self.errors: list[CheckpointError] = []
        """Why saves have failed, for the caller to record and clear."""
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
        self.errors.append(error)
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


POSTPONED_STEPS: Final = 8
"""Steps until a row save that was due while another save was under way is tried again."""
COSTS_KEPT: Final = 256
"""Number of newest costs and events of saves that `take_costs` can return."""
POLL_S: Final = 0.1
"""Pause before the last save is tried again, where a busy checkpointer skips saves."""


class Saves:
    """Saves periodically, on request, and at the end.

    Periodic saves hold everything, or the most important rows; all others hold everything.

    Args:
        checkpointer: writes the saves.
        progress: counts each save of the run before the count is published in shared memory.
        pace: decides when periodic saves are due.
        moment: `consistent` or `rolling`, for full periodic saves; see `Checkpointer.save`.
        rows: chooses rows; None: all periodic saves are full.
        writer: writes the history of the run; given on rank 0 only.
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
        self._costs: deque[SaveCost | SaveEvent] = deque(maxlen=COSTS_KEPT)

    @property
    def history(self) -> RunHistory | None:
        """Measured costs so far, on rank 0."""
        return self._writer.history if self._writer is not None else None

    def take_costs(self) -> list[SaveCost | SaveEvent]:
        """Return what was committed, has begun and has failed since the last call, oldest first."""
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
            self._note_costs()
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
            self._retries.errors.append(error)
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
        self._costs.append(SaveEvent(step=self._progress.steps_done, blocked_s=save.blocked_s))
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
        for error in self._retries.errors:
            self._costs.append(SaveEvent(step=self._progress.steps_done, failure=str(error)))
            if self._writer is not None:
                self._writer.note_failed_save()
        self._retries.errors.clear()

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
