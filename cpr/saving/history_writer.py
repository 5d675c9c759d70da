"""What a run measures of its saves and failures, written down as it goes: a JSON file beside its saves.

Rank 0 keeps it, through all generations of workers. It is written in the background, at each beginning, after
the first step, and whenever a save has been committed; a diary that cannot be written stops no training. Nor
does one that cannot be read: until that succeeds the file stays as it is, and then what was measured since is
added to it. What a save cost is known from the steps beside it (`cpr.saving.step_times`).
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Final

from cpr.checkpoint.save.writer_thread import Save
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CheckpointError
from cpr.estimator.history import (
    SAVES_KEPT,
    FailureCost,
    RunHistory,
    SaveCost,
    newest_saves,
    read_history,
    write_history,
)
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Recovery
from cpr.saving.step_times import SaveBeside, StepTimes

LEAVE_S: Final = 5.0
"""How long the end of a run waits for the storage to take its diary."""

logger = logging.getLogger(__name__)


class HistoryWriter:
    """Keeps the history of a run, from a beginning on; on rank 0. Called by the thread that trains.

    Args:
        storage: of the checkpoint.
        progress: of the run, which tells of this beginning.
        check_lock: gives the epoch of this run's ownership of the directory; raises a `CheckpointError`
            unless the directory still is this run's.
        nodes: failure domains.
        samples_total: of the whole run; None: not known.
        row_share: of a table's rows with which a row save counts.
    """

    def __init__(
        self,
        storage: Storage,
        progress: RunProgress,
        check_lock: Callable[[], int],
        *,
        nodes: int,
        samples_total: int | None,
        row_share: float = 1.0,
    ) -> None:
        self._storage, self._progress, self._row_share = storage, progress, row_share
        self._check_lock = check_lock
        self._story = story = progress.recoveries[-1]
        self._history = RunHistory(
            world_size=story.world_size,
            nodes=nodes,
            step_s=0.0,
            steps_done=progress.steps_done,
            samples_done=progress.samples_done,
            samples_total=samples_total,
            elapsed_s=0.0,
            clock_s=time.time(),
        )
        self._is_failure = story.kind in {"process", "partial", "full"}
        if self._is_failure:
            self._history = self._history.with_failure(self._failure(story))
        self._is_read = story.kind == "start"
        self._found: tuple[RunHistory | None] | None = None
        if not self._is_read:
            self._read()
            self._take_up()
        self._is_first_step = True
        self._step_ended: float | None = None
        self._step_times = StepTimes()
        self._under_way: list[SaveBeside] = []
        self._writer: Thread | None = None
        self._is_behind = True
        self._write()

    @property
    def history(self) -> RunHistory:
        """What was measured until now."""
        now_s, step_s = time.time(), self._step_times.median_s
        return replace(
            self._history,
            step_s=self._history.step_s if step_s is None else step_s,
            steps_done=self._progress.steps_done,
            samples_done=self._progress.samples_done,
            elapsed_s=self._history.elapsed_s + max(0.0, now_s - self._history.clock_s),
            clock_s=now_s,
        )

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return any(not each.save.is_over for each in self._under_way)

    def step(self) -> None:
        """A training step is complete."""
        now = time.perf_counter()
        if self._step_ended is not None:
            self._step_times.note(now - self._step_ended, self._under_way)
        self._step_ended = now
        if self._is_first_step:
            self._is_first_step = False
            self._note_first_step()
        for each in [each for each in self._under_way if each.save.is_over]:
            self._under_way.remove(each)
            self._note_saved(each)
        self._take_up()
        if self._is_behind:
            self._write()

    def note_save(self, save: Save) -> None:
        """A save was begun, after this step."""
        self._under_way.append(SaveBeside(save, self._progress.steps_done))

    def finish(self) -> None:
        """The run has reached its end, and nothing is under way any more."""
        for each in self._under_way:
            self._note_saved(each)
        self._under_way.clear()
        self._write_and_wait()
        if self._take_up():
            self._write_and_wait()

    def _write_and_wait(self) -> None:
        self._wait()
        self._write()
        self._wait()

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join(LEAVE_S)

    def _failure(self, story: Recovery) -> FailureCost:
        """What the run knows of it at once; nodes that full recovery was about are lost as well."""
        assert story.kind in {"process", "partial", "full"}
        return FailureCost(
            elapsed_s=self._history.elapsed_s,
            kind=story.kind,
            lost_share=story.lost_share,
            nodes_lost=story.lost_share * self._history.nodes,
            seconds=dict(story.seconds),
        )

    def _note_first_step(self) -> None:
        """What a failure has cost is known when the first step is done."""
        if self._is_failure:
            *older, newest = self._history.failures
            newest = replace(newest, seconds=dict(self._progress.recoveries[-1].seconds))
            self._history = replace(self._history, failures=(*older, newest))
        self._is_behind = True

    def _note_saved(self, beside: SaveBeside) -> None:
        save = beside.save
        if save.manifest is None or save.seconds is None:
            return
        cost = SaveCost(
            step=beside.step,
            kind=save.kind,
            num_bytes=save.manifest.num_bytes,
            blocked_s=beside.blocked_s,
            seconds=save.seconds,
            share=self._row_share if save.kind == "rows" else 1.0,
            slowed_s=beside.slowed_s,
        )
        self._history = self._history.with_save(cost)
        self._is_behind = True

    def _write(self) -> None:
        if self._writer is not None and self._writer.is_alive():
            return
        self._is_behind = False
        put = partial(self._put, self.history)
        self._writer = Thread(target=put if self._is_read else self._read, name="history-writer", daemon=True)
        self._writer.start()

    def _put(self, history: RunHistory) -> None:
        try:
            write_history(self._storage, history, self._check_lock())
        except (CheckpointError, OSError) as error:
            logger.warning("what the run has measured could not be written down: %s", error)

    def _read(self) -> None:
        """Read what the generations before have measured, or leave it as it is for now."""
        found = None
        try:
            found = read_history(self._storage)
        except ValueError as error:
            logger.warning("%s. The history of this run begins anew", error)
        except (CheckpointError, OSError) as error:
            logger.warning("what the run has measured until now cannot be read yet: %s", error)
            return
        self._found = (found,)

    def _take_up(self) -> bool:
        """Go on with what was read, if that is news; from then on this is written. Whether it was."""
        if self._found is None:
            return False
        (before,), self._found = self._found, None
        self._is_read = self._is_behind = True
        if before is not None:
            mine, elapsed_s = self._history, _elapsed(before, self._story, self._history.clock_s)
            failed_s = max(0.0, elapsed_s - sum(self._story.seconds.values()))
            self._history = replace(
                mine,
                step_s=before.step_s,
                elapsed_s=elapsed_s,
                saves=newest_saves((*before.saves, *mine.saves), SAVES_KEPT),
                failures=(*before.failures, *(replace(each, elapsed_s=failed_s) for each in mine.failures)),
            )
        return True


def _elapsed(before: RunHistory, story: Recovery, now_s: float) -> float:
    """Of the run until now; while workers are replaced the clock goes on, while a run pauses it does not."""
    pause_s = 0.0 if story.kind == "resume" else max(0.0, now_s - before.clock_s)
    return before.elapsed_s + pause_s
