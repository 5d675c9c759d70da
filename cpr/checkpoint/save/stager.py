"""Copies the rows of a save out of the tables: what a save costs training.

A rolling save is copied a little after each training step. A consistent one is copied by a thread of its own,
beside the forward pass of the next step, which only reads: training waits for it at the moment before rows
change (`settle`, which `cpr.shards.before_updates` calls), so that all rows are of the moment of the call.
Rows whose changes nobody announces, or that a copy cannot read beside training (on CUDA, behind a device
cache, updated by an ordinary optimizer), are copied before the call returns.

The thread needs nobody but the writer, which gives buffers back without asking other ranks. So it comes to
its end wherever the training threads of the ranks are waiting, for it or for each other.
"""

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from typing import Final

from torch import Tensor

from cpr.checkpoint.save.snapshot import Piece, Snapshot
from cpr.checkpoint.save.staging import PIECE_BYTES, StagingPool
from cpr.checkpoint.save.writer_thread import Save, describe
from cpr.checkpoint.state.model_state import States

ROLLING_BYTES_PER_STEP: Final = 64 * 2**20
"""What a rolling save copies between two training steps at most: some milliseconds."""
HANDOVER_BYTES: Final = 128 * 2**20
"""What is copied before the writer hears of it: at work at the same time, it would slow the copying down."""
POLL_S: Final = 0.1
"""How often copying that waits for a buffer looks whether it is still wanted."""

Enough = Callable[[int], bool]


@dataclass(frozen=True, eq=False)
class _Job:
    save: Save
    snapshot: Snapshot
    states: States
    given_up: Event = field(default_factory=Event)
    """Set when nothing more of it is to be copied."""

    @property
    def is_copied(self) -> bool:
        """Whether nothing is left to copy, or nothing of it could be written."""
        return self.snapshot.done or self.save.broken.is_set()


class Stager:
    """Copies for one save at a time. All methods are for the training thread.

    Args:
        pool: where the copies go; its size is the memory ceiling.
    """

    def __init__(self, pool: StagingPool) -> None:
        self._pool = pool
        self._job: _Job | None = None
        self._beside: tuple[Thread, _Job] | None = None

    @property
    def is_copying(self) -> bool:
        """Whether some of the save that was begun is still to be copied."""
        return self._job is not None

    def begin(self, save: Save, snapshot: Snapshot, states: States) -> None:
        """Take on a save; nothing is copied yet.

        Args:
            save: gets the pieces.
            snapshot: its rows, those that are urgent first.
            states: handed over when all is copied.
        """
        self._job = _Job(save, snapshot, states)

    def copy_some(self, step: int) -> None:
        """Copy the next pieces of a rolling save, as far as buffers are free.

        Args:
            step: training steps done.
        """
        if self._job is not None and self._beside is None:
            self._copy_here(self._job, step, lambda copied: copied >= ROLLING_BYTES_PER_STEP, wait=False)

    def copy_beside(self, step: int, deadline: float | None = None) -> None:
        """Copy all: what is urgent now, the rest in a thread, beside training.

        Args:
            step: training steps done.
            deadline: by `time.monotonic`; what is not copied by then is given up.
        """
        assert self._job is not None
        snapshot = self._job.snapshot
        self._copy_here(self._job, step, lambda _: not snapshot.is_urgent, deadline=deadline)
        if (job := self._job) is not None:
            arguments = (job, step, deadline)
            thread = Thread(target=self._copy_rest, args=arguments, name="checkpoint-copier", daemon=True)
            self._beside = thread, job
            thread.start()

    def settle(self, deadline: float | None = None) -> None:
        """Wait until no thread reads tables any more; to be called before anything changes them.

        Args:
            deadline: by `time.monotonic`; what is not copied by then is given up.
        """
        if self._beside is None:
            return
        began = time.perf_counter()
        thread, job = self._beside
        thread.join(seconds_left(deadline))
        if thread.is_alive():
            _run_out(job)
            thread.join()
        self._beside = None
        job.save.blocked_s += time.perf_counter() - began

    def finish(self, step: int, deadline: float | None = None) -> None:
        """Copy, or wait for, all that is left; what is not copied at the deadline is given up."""
        self.settle(deadline)
        if self._job is not None:
            self._copy_here(self._job, step, _never, deadline=deadline)

    def give_up(self) -> None:
        """Let the save that is being copied fail."""
        job = self._job
        if job is not None:
            job.given_up.set()
        self.settle()
        if job is not None:
            self._end(job)

    def _copy_here(
        self, job: _Job, step: int, enough: Enough, *, wait: bool = True, deadline: float | None = None
    ) -> None:
        began = time.perf_counter()
        self._copy(job, step, enough, wait=wait, deadline=deadline)
        job.save.blocked_s += time.perf_counter() - began

    def _copy_rest(self, job: _Job, step: int, deadline: float | None) -> None:
        with suppress(Exception):  # it has made the save fail, which training hears of
            self._copy(job, step, _never, deadline=deadline)

    def _copy(
        self, job: _Job, step: int, enough: Enough, *, wait: bool = True, deadline: float | None = None
    ) -> None:
        """Copy pieces until it is enough and hand them over; after the last one, the states.

        Args:
            job: what to copy.
            step: training steps done.
            enough: whether to stop, by the bytes that are copied.
            wait: for buffers, when none is free.
            deadline: give the save up then.
        """
        ready: list[Piece] = []
        copied = 0
        try:
            while not (job.is_copied or job.given_up.is_set() or enough(copied)):
                if seconds_left(deadline) == 0:
                    _run_out(job)
                    break
                buffer = self._pool.acquire(wait=False)
                if buffer is None or len(ready) * PIECE_BYTES >= HANDOVER_BYTES:
                    job.save.feed_all(ready)
                if buffer is None and wait:
                    buffer = self._pool.acquire(timeout_s=POLL_S)
                elif buffer is None:
                    break
                if buffer is not None:
                    ready.append(self._piece(job, buffer, step))
                    copied += buffer.numel()
        except BaseException as error:
            job.save.feed_all(ready)
            self._end(job, describe(error))
            raise
        job.save.feed_all(ready)
        if job.is_copied or job.given_up.is_set():
            self._end(job)

    def _piece(self, job: _Job, buffer: Tensor, step: int) -> Piece:
        try:
            return job.snapshot.copy_next(buffer, step)
        except BaseException:
            self._pool.release(buffer)
            raise

    def _end(self, job: _Job, problem: str | None = None) -> None:
        """Hand over the end of a save, once."""
        if self._job is not job:
            return
        self._job = None
        if problem is None and job.is_copied:
            job.save.feed(job.states)
        else:
            late = "copying took longer than it was given"
            ended = "training ended before everything was copied"
            job.save.cancel(problem or (late if job.save.is_out_of_time else ended))


def _run_out(job: _Job) -> None:
    """The time that was given for copying is over."""
    job.save.is_out_of_time = True
    job.given_up.set()


def seconds_left(deadline: float | None) -> float | None:
    """Seconds until a time by `time.monotonic`, not below 0; None: as long as it takes."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _never(_: int) -> bool:
    return False
