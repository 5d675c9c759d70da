"""SIGINT and SIGTERM: stop at once, or at a step boundary where all ranks can agree on it.

Outside the training loop (imports, building, loading) a signal raises `StopRequested` in the main thread.
Inside the loop it is recorded, and all ranks stop after the same step or before the same evaluation batch, so
that a save is complete. If that does not happen in time (a dead peer, hanging storage, native code that never
returns to Python's signal handlers), a watchdog thread, woken by the kernel through a pipe, ends the process.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
_NO_SIGNAL: Final = b"\0"


class StopRequested(BaseException):  # not an error: must pass `except Exception`
    """A signal asked this process to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """The exit code that a shell expects of a process ended by a signal."""
        return 128 + self.signum


class StopSignal:
    """Catches SIGINT and SIGTERM inside its `with` block; main thread only.

    Args:
        grace: longest wait for the end of a step; then `StopRequested` is raised wherever the main thread is.
        tidy_up: longest time to leave the block after that; then the process ends by force.
    """

    def __init__(
        self, grace: timedelta = timedelta(seconds=2), tidy_up: timedelta = timedelta(seconds=3)
    ) -> None:
        self._grace_s = grace.total_seconds()
        self._tidy_up_s = tidy_up.total_seconds()
        self.signum: int | None = None
        """The signal that this rank got, or None."""
        self._deferring = False
        self._raised = self._overdue = False
        self._previous: dict[int, Any] = {}
        self._left = threading.Event()
        self._extension_s = 0.0
        self._signalled_at = 0.0

    @property
    def requested(self) -> bool:
        """Whether this rank got a signal."""
        return self.signum is not None

    def leave(self) -> None:
        """Stop now, after all ranks have agreed to.

        Raises:
            StopRequested: always.
        """
        raise StopRequested(self.signum if self.signum is not None else signal.SIGTERM)

    @property
    def seconds_since(self) -> float:
        """Seconds since this rank's first signal; 0 without one."""
        return time.monotonic() - self._signalled_at if self.requested else 0.0

    @contextmanager
    def extended(self, by: timedelta) -> Iterator[None]:
        """Allow a stop more time within this block: SIGTERM is only recorded, and Ctrl-C stops at once.

        Args:
            by: extension of the grace; 0 changes nothing.
        """
        self._extension_s = by.total_seconds()
        try:
            yield
        finally:
            self._extension_s = 0.0

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only record SIGTERM, and the first SIGINT, within this block: the ranks agree where to stop."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def __enter__(self) -> Self:
        self._woken, self._wake_up = os.pipe()
        os.set_blocking(self._wake_up, False)
        self._previous_fd = signal.set_wakeup_fd(self._wake_up, warn_on_full_buffer=False)
        for signum in SIGNALS:
            self._previous[signum] = signal.signal(signum, self._on_signal)
        self._watchdog = threading.Thread(
            target=self._watch, args=(threading.get_ident(),), name="stop-watchdog", daemon=True
        )
        self._watchdog.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restore the previous signal handlers."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._left.set()
        os.write(self._wake_up, _NO_SIGNAL)
        self._watchdog.join()
        os.close(self._wake_up)
        os.close(self._woken)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        again = self.signum is not None
        may_finish = (
            signum == signal.SIGTERM and not self._overdue and (self._deferring or self._extension_s > 0)
        )
        # Slurm and systemd send SIGTERM to all processes of a job, and torchrun sends it to its workers again
        if again and may_finish:
            return  # an earlier SIGINT still counts
        if not again:
            self._signalled_at = time.monotonic()
        self.signum = signum
        if not may_finish and (again or not self._deferring):
            self._raised = True
            raise StopRequested(signum)

    def _watch(self, main_thread: int) -> None:
        """Body of the watchdog: end the process in time after the first signal."""
        signum = 0
        while signum not in SIGNALS:  # Python writes the number of every signal into the pipe
            signum = os.read(self._woken, 1)[0]
            if self._left.is_set():
                return
        if self._left.wait(self._grace_s):
            return
        if signum == signal.SIGTERM and self._extension_s and self._left.wait(self._extension_s):
            return
        self._overdue = True
        if not self._raised:
            signal.pthread_kill(main_thread, signum)  # a second signal always raises
        if self._left.wait(self._tidy_up_s):
            return
        os.write(2, f"{StopRequested(signum)}, by force: a call did not return\n".encode())
        os._exit(128 + signum)  # exit handlers could hang like the main thread
