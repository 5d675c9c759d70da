"""Staging: copies the rows of a save out of the tables, which is the cost of a save to training.

Rows are copied by a thread during the forward pass of the next step, which only reads. Before rows change
(`settle`, which `cpr.shards.before_updates` calls), training waits for the thread: in a consistent save until
it has copied all rows, so that they are of the moment of the call; in a rolling save until it has copied the
piece that it is at, and it continues after the step. Rows that cannot be copied in the background (on CUDA,
behind a device cache, or updated by an ordinary optimizer, which announces no updates) are copied before the
call returns, in a rolling save some of them after each step.

The thread depends only on the writer, which releases buffers without communication. So it finishes even while
the training threads of the ranks wait for it or for each other.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread
from typing import Final

from cpr.checkpoint.save.snapshot import Snapshot, StagedRows
from cpr.checkpoint.save.staging import PIECE_BYTES, StagingPool
from cpr.checkpoint.save.writer_thread import Save, describe, lower_priority
from cpr.checkpoint.state.model_state import CapturedState

ROLLING_BYTES_PER_STEP: Final = 64 * 2**20
"""Most bytes for which training waits after a step of a rolling save: some milliseconds."""
HANDOVER_BYTES: Final = 128 * 2**20
"""Bytes that are copied before the writer gets them: writing at the same time would slow copying down."""
POLL_S: Final = 0.01
"""How often copying that waits for a buffer checks whether it must stop."""

Enough = Callable[[int], bool]
"""Whether copying may stop for this step, by the bytes that were copied in it."""


@dataclass(frozen=True, eq=False)
class _Job:
    save: Save
    snapshot: Snapshot
    states: CapturedState
    given_up: Event = field(default_factory=Event)
    """Set when copying must stop."""
    is_waited_for: Event = field(default_factory=Event)
    """Set while training waits, for which a rolling save stops copying in this step."""

    @contextmanager
    def blocking(self) -> Iterator[None]:
        """Count the time of the block as time for which training waits."""
        began = time.perf_counter()
        yield
        self.save.blocked_s += time.perf_counter() - began

    @property
    def is_copied(self) -> bool:
        """Whether nothing is left to copy, or the writer has failed."""
        return self.snapshot.done or self.save.broken.is_set()


class Stager:
    """Copies the rows of one save at a time, into buffers of a pool whose size limits the memory of a save.

    All methods are called by the training thread. `step` is the training steps done, `deadline` a time by
    `time.monotonic`: a save whose copying takes longer is given up.
    """

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self._job: _Job | None = None
        self._background: tuple[Thread, _Job] | None = None

    def begin(self, save: Save, snapshot: Snapshot, states: CapturedState) -> None:
        """Begin a save; copies nothing yet."""
        self._job = _Job(save, snapshot, states)

    def copy_some(self, step: int) -> None:
        """Copy the next pieces of a rolling save, as far as buffers are free, in the background if possible.

        At least one piece, so that a save ends however short steps are.
        """
        if (job := self._job) is None or self._background is not None:
            return

        def enough_here(copied: int) -> bool:
            return copied >= ROLLING_BYTES_PER_STEP or not job.snapshot.is_urgent

        def enough_in_background(copied: int) -> bool:
            return copied > 0 and job.is_waited_for.is_set()

        if job.snapshot.is_urgent:
            job.is_waited_for.set()
            with job.blocking():
                self._copy(job, step, enough_here, is_rolling=True)
        if self._job is job and not job.snapshot.is_urgent:
            copy = partial(self._copy, job, step, enough_in_background, is_rolling=True)
            self._start(job, copy, is_gentle=True)

    def copy_in_background(self, step: int, deadline: float | None = None) -> None:
        """Copy urgent rows now, and the others in a background thread."""
        assert self._job is not None
        snapshot = self._job.snapshot
        with self._job.blocking():
            self._copy(self._job, step, lambda _: not snapshot.is_urgent, deadline=deadline)
        if (job := self._job) is not None:
            self._start(job, partial(self._copy, job, step, _never, deadline=deadline))

    def _start(self, job: _Job, copy: Callable[[], None], *, is_gentle: bool = False) -> None:
        """Copy in a thread, which yields to training if it `is_gentle`."""

        def run() -> None:
            if is_gentle:
                lower_priority()
            with suppress(Exception):  # the save has failed by then, and reports the error
                copy()

        job.is_waited_for.clear()
        thread = Thread(target=run, name="checkpoint-stager", daemon=True)
        self._background = thread, job
        thread.start()

    def settle(self, deadline: float | None = None) -> None:
        """Wait until the background thread has stopped reading tables; called before they change."""
        if self._background is None:
            return
        thread, job = self._background
        with job.blocking():
            job.is_waited_for.set()
            self._pool.wake()  # it may wait for a buffer, which takes as long as writing a piece
            thread.join(seconds_left(deadline))
            if thread.is_alive():
                _run_out(job)
                thread.join()
            self._background = None

    def finish(self, step: int, deadline: float | None = None) -> None:
        """Copy all remaining rows, or wait for that."""
        self.settle(deadline)
        if self._job is not None:
            with self._job.blocking():
                self._copy(self._job, step, _never, deadline=deadline)

    def give_up(self) -> None:
        """Stop copying; the present save fails."""
        job = self._job
        if job is not None:
            job.given_up.set()
        self.settle()
        if job is not None:
            self._end(job)

    def _copy(
        self,
        job: _Job,
        step: int,
        enough: Enough,
        *,
        is_rolling: bool = False,
        deadline: float | None = None,
    ) -> None:
        """Copy pieces until there are enough bytes and pass them to the save; after the last one, the states.

        Waits for free buffers; in a rolling save only while training does not wait.
        """
        ready: list[StagedRows] = []
        copied = 0
        try:
            while not (job.is_copied or job.given_up.is_set() or enough(copied)):
                if seconds_left(deadline) == 0:
                    _run_out(job)
                    break
                buffer = self._pool.acquire()
                # Without a free buffer the writer must get all that is ready, or it could release none.
                if buffer is None or len(ready) * PIECE_BYTES >= HANDOVER_BYTES:
                    _hand_over(ready, job)
                if buffer is None:
                    if is_rolling and job.is_waited_for.is_set():
                        break
                    buffer = self._pool.acquire(POLL_S)
                if buffer is not None:
                    try:
                        ready.append(job.snapshot.copy_next(buffer, step))
                    except BaseException:
                        self._pool.release(buffer)
                        raise
                    copied += buffer.numel()
        except BaseException as error:
            _hand_over(ready, job)
            self._end(job, describe(error))
            raise
        _hand_over(ready, job)
        if job.is_copied or job.given_up.is_set():
            self._end(job)

    def _end(self, job: _Job, problem: str | None = None) -> None:
        """Tell the writer thread, once, that copying for a save has ended, or why it failed."""
        if self._job is not job:
            return
        self._job = None
        if problem is None and job.is_copied:
            job.save.items.put(job.states)
        else:
            late = "copying took longer than it was given"
            ended = "training ended before everything was copied"
            job.save.items.put(problem or (late if job.save.is_out_of_time else ended))


def _hand_over(pieces: list[StagedRows], job: _Job) -> None:
    while pieces:
        job.save.items.put(pieces.pop(0))


def _run_out(job: _Job) -> None:
    """Give a save up because its time limit ran out."""
    job.save.is_out_of_time = True
    job.given_up.set()


def seconds_left(deadline: float | None) -> float | None:
    """Seconds until a time by `time.monotonic`, at least 0; None: no limit."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _never(_: int) -> bool:
    return False
