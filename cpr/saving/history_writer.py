"""History of a run: measures what its saves and failures cost, and writes that to a JSON file with the saves.

Rank 0 keeps the history, through all generations of workers. The file is written in the background: at each
start, after the first step, and when a save was committed or has failed. A history that cannot be written
stops no training. While the file cannot be read, it stays as it is; once it can, the new measurements are
added to it.

During a save, steps share processors, memory and disks with it on all ranks, which wait for each other in
every step. So one rank can measure how much longer steps take for all of them.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from textwrap import shorten
from threading import Thread
from typing import Final

from cpr.checkpoint.save.writer_thread import Save
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CheckpointError
from cpr.estimator.history import (
    DEAD_KEPT,
    SAVES_KEPT,
    FailureCost,
    RunHistory,
    SaveCost,
    newest_saves,
    read_history,
    write_history,
)
from cpr.recovery.run.progress import RunProgress
from cpr.recovery.run.report import Ending, Recovery, RowOrigin

LEAVE_S: Final = 5.0
"""How long the end of a run waits for the storage to write the history."""
STEPS_KEPT: Final = 128
"""Number of newest steps in the median and the mean of step times."""
FAR_LONGER: Final = 8.0
"""A step that takes so many times the median contains something else, such as an evaluation."""
WHY_WIDTH: Final = 300
"""Characters of a worker's end in a history."""

logger = logging.getLogger(__name__)


class ConcurrentSave:
    """A save that is under way, and the steps during it."""

    def __init__(self, save: Save, step: int) -> None:
        self.save, self.step = save, step
        self._blocked_s = 0.0
        self._longer_s = 0.0
        self._far_longer_s = 0.0
        self._is_known = False

    @property
    def blocked_s(self) -> float:
        """Seconds that training waited for the save, on the rank where it waited longest."""
        return max(self.save.blocked_s, self.save.longest_blocked_s)

    @property
    def slowed_s(self) -> float | None:
        """Seconds that steps took longer, besides `blocked_s`; negative: shorter. None: unknown.

        When another rank waited longer, this rank waited for that rank in its next step. So of steps that
        were far longer, that much is attributed to the save.
        """
        if not self._is_known:
            return None
        for_others_s = self.blocked_s - self.save.blocked_s
        return self._longer_s + min(self._far_longer_s, for_others_s) - for_others_s

    def blocked_since(self) -> float:
        """Seconds that training waited for the save on this rank since the last call."""
        before_s, self._blocked_s = self._blocked_s, self.save.blocked_s
        return self._blocked_s - before_s

    def note(self, longer_s: float, is_far: bool) -> None:
        """Add how much longer a step took than others, besides waiting on this rank."""
        self._is_known = True
        if is_far:
            self._far_longer_s += longer_s
        else:
            self._longer_s += longer_s


class StepTimes:
    """Durations of the newest steps; those during saves are kept apart."""

    def __init__(self) -> None:
        self._undisturbed_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._during_saves_s: deque[float] = deque(maxlen=STEPS_KEPT)

    @property
    def median_s(self) -> float | None:
        """Median of steps without saves; if there are none, of those during saves, without waiting."""
        steps = self._undisturbed_s or self._during_saves_s
        return median(steps) if steps else None

    def note(self, took_s: float, saves: Sequence[ConcurrentSave]) -> None:
        """Add a step that took so many seconds, and the saves that were under way in any part of it."""
        if not saves:
            self._undisturbed_s.append(took_s)
            return
        rest_s = took_s - sum(save.blocked_since() for save in saves)
        self._during_saves_s.append(rest_s)
        if self._undisturbed_s:
            far_s = FAR_LONGER * median(self._undisturbed_s)
            usual_s = fmean(each for each in self._undisturbed_s if each <= far_s)
            for save in saves:
                save.note((rest_s - usual_s) / len(saves), is_far=rest_s > far_s)


class HistoryWriter:
    """Keeps the history of a run, on rank 0; called by the thread that trains.

    Args:
        storage: of the checkpoint.
        progress: of the run, with the report of this start.
        check_lock: returns the epoch of this run's ownership of the directory; raises a `CheckpointError`
            unless the directory still belongs to this run.
        nodes: number of failure domains.
        samples_total: of the whole run; None: unknown.
        row_share: share of a table's rows that a row save counts for.
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
        self._is_failure = story.kind not in {"start", "resume"}
        if self._is_failure:
            self._history = self._history.with_failure(self._failure(story))
        self._is_read = story.kind == "start"
        self._found: tuple[RunHistory | None] | None = None
        if not self._is_read:
            self._read()
            self._merge_found()
        self._is_first_step = True
        self._step_ended: float | None = None
        self._step_times = StepTimes()
        self._under_way: list[ConcurrentSave] = []
        self._writer: Thread | None = None
        self._is_behind = True
        self._write()

    @property
    def history(self) -> RunHistory:
        """Everything measured until now."""
        now_s, step_s = time.time(), self._step_times.median_s
        return replace(
            self._history,
            step_s=self._history.step_s if step_s is None else step_s,
            steps_done=self._progress.steps_done,
            samples_done=self._progress.samples_done,
            pls=self._progress.pls_total,
            elapsed_s=self._history.elapsed_s + max(0.0, now_s - self._history.clock_s),
            clock_s=now_s,
        )

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way."""
        return any(not each.save.is_over for each in self._under_way)

    def step(self) -> None:
        """Measure a finished training step."""
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
        self._merge_found()
        if self._is_behind:
            self._write()

    def note_save(self, save: Save) -> None:
        """Watch a save that was begun after this step."""
        self._under_way.append(ConcurrentSave(save, self._progress.steps_done))

    def note_failed_save(self) -> None:
        """Count a save that has failed, or could not begin."""
        self._history = replace(self._history, failed_saves=self._history.failed_saves + 1)
        self._is_behind = True

    def finish(self) -> None:
        """Write the end of the run; no save is under way any more."""
        for each in self._under_way:
            self._note_saved(each)
        self._under_way.clear()
        self._write_and_wait()
        if self._merge_found():
            self._write_and_wait()

    def _write_and_wait(self) -> None:
        self._wait()
        self._write()
        self._wait()

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join(LEAVE_S)

    def _failure(self, story: Recovery) -> FailureCost:
        """Cost of the failure as known at the start; a full recovery counts its lost nodes too."""
        assert story.kind != "start"
        assert story.kind != "resume"
        return FailureCost(
            elapsed_s=self._history.elapsed_s,
            kind=story.kind,
            lost_share=story.lost_share,
            nodes_lost=story.lost_share * self._history.nodes,
            seconds=dict(story.seconds),
            step=story.step,
            reason=_plain(story.reason),
            dead=_endings(story.dead),
            rows=_rows_by_origin(story.sources),
            pls_added=story.pls_added,
        )

    def _note_first_step(self) -> None:
        """Complete the cost of the failure, which ends with the first step."""
        if self._is_failure:
            *older, newest = self._history.failures
            newest = replace(newest, seconds=dict(self._progress.recoveries[-1].seconds))
            self._history = replace(self._history, failures=(*older, newest))
        self._is_behind = True

    def _note_saved(self, ended: ConcurrentSave) -> None:
        save = ended.save
        if save.manifest is None or save.seconds is None:
            return
        cost = SaveCost(
            step=ended.step,
            kind=save.kind,
            num_bytes=save.manifest.num_bytes,
            blocked_s=ended.blocked_s,
            seconds=save.seconds,
            share=self._row_share if save.kind == "rows" else 1.0,
            slowed_s=ended.slowed_s,
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
            logger.warning("the history of this run could not be written: %s", error)

    def _read(self) -> None:
        """Read the history of earlier generations; if that fails for now, it is tried again later."""
        found = None
        try:
            found = read_history(self._storage)
        except ValueError as error:
            logger.warning("%s. The history of this run starts over", error)
        except (CheckpointError, OSError) as error:
            logger.warning("the history of this run cannot be read yet: %s", error)
            return
        self._found = (found,)

    def _merge_found(self) -> bool:
        """Continue the history once it was read, and write the file from then on; whether that is new."""
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
                failed_saves=before.failed_saves + mine.failed_saves,
                failures=(*before.failures, *(replace(each, elapsed_s=failed_s) for each in mine.failures)),
            )
        return True


def _endings(dead: Sequence[Ending]) -> tuple[str, ...]:
    """How the first workers ended, shortened."""
    texts = [shorten(str(each), WHY_WIDTH, placeholder=" ...") for each in dead[:DEAD_KEPT]]
    more = [f"and {len(dead) - DEAD_KEPT} more"] if len(dead) > DEAD_KEPT else []
    return tuple(map(_plain, (*texts, *more)))


def _plain(text: str) -> str:
    """Text without lone surrogates, as of file names in an error, for which the file would be refused."""
    return text.encode(errors="replace").decode()


def _rows_by_origin(origins: Sequence[RowOrigin]) -> dict[str, int]:
    names = ("adopted", "moved", "mirrored", "lost")
    return {name: sum(getattr(each, name) for each in origins) for name in names} if origins else {}


def _elapsed(before: RunHistory, story: Recovery, now_s: float) -> float:
    """Duration of the run: time while workers are replaced counts, time while the run pauses does not."""
    pause_s = 0.0 if story.kind == "resume" else max(0.0, now_s - before.clock_s)
    return before.elapsed_s + pause_s
