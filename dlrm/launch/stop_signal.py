"""Ctrl-C and SIGTERM: leave at once, and leave tidily where that is possible.

Outside the training loop (importing, building, loading what was saved) the signal raises `StopRequested` at
once, wherever the main thread is. Inside it, the signal is noted, and all ranks agree to stop after the same
step or before the same batch of an evaluation: what is saved then is whole.
Whatever keeps that from happening (a peer that is gone, storage that hangs, a library deep in native code,
where Python cannot run its signal handlers) is left by force: a second thread, which the kernel wakes
through a pipe, knows of the signal too.
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
NO_SIGNAL: Final = b"\0"


class StopRequested(BaseException):  # not an error: must pass `except Exception`
    """Somebody asked this process to stop.

    Args:
        signum: the signal that did.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended."""
        return 128 + self.signum


class StopSignal:
    """Listens to the signals while it is entered (`with`); main thread only.

    Args:
        grace: how long a deferred stop may wait for the end of a step; then `StopRequested` is raised
            wherever the main thread is.
        tidy_up: how long after that the main thread may still take to leave the `with` block; then the
            process ends without it.
    """

    def __init__(
        self, grace: timedelta = timedelta(seconds=2), tidy_up: timedelta = timedelta(seconds=3)
    ) -> None:
        self._grace_s = grace.total_seconds()
        self._tidy_up_s = tidy_up.total_seconds()
        self.signum: int | None = None
        """The signal that came on this rank, if one did."""
        self._deferring = False
        self._raised = False
        self._previous: dict[int, Any] = {}
        self._left = threading.Event()
        self._extension_s = 0.0
        self._came_at = 0.0

    @property
    def requested(self) -> bool:
        """Whether a signal came on this rank."""
        return self.signum is not None

    def leave(self) -> None:
        """Stop now, because all ranks agreed to.

        Raises:
            StopRequested: always.
        """
        raise StopRequested(self.signum if self.signum is not None else signal.SIGTERM)

    @property
    def seconds_since(self) -> float:
        """Seconds since the first signal came on this rank; 0 if none did."""
        return time.monotonic() - self._came_at if self.requested else 0.0

    @contextmanager
    def extended(self, by: timedelta) -> Iterator[None]:
        """Within this block a stop may take longer, and SIGTERM is only noted; Ctrl-C leaves at once.

        Args:
            by: how much longer than the grace; with 0 the block changes nothing.
        """
        self._extension_s = by.total_seconds()
        try:
            yield
        finally:
            self._extension_s = 0.0

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this block the first signal is only noted, for the ranks to agree where to stop."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def __enter__(self) -> Self:
        """Begin to listen."""
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
        """Give the signals back."""
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._previous_fd)
        self._left.set()
        os.write(self._wake_up, NO_SIGNAL)
        self._watchdog.join()
        os.close(self._wake_up)
        os.close(self._woken)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        again = self.signum is not None
        may_finish = signum == signal.SIGTERM and self._extension_s > 0
        if again and may_finish:
            return  # SIGINT before it still counts
        if not again:
            self._came_at = time.monotonic()
        self.signum = signum
        if not may_finish and (again or not self._deferring):
            self._raised = True
            raise StopRequested(signum)

    def _watch(self, main_thread: int) -> None:
        """Body of the watchdog: after the first signal, see to it that the process ends in time."""
        signum = 0
        while signum not in SIGNALS:  # other signals are none of its business
            signum = os.read(self._woken, 1)[0]
            if self._left.is_set():
                return
        if self._left.wait(self._grace_s):
            return
        if signum == signal.SIGTERM and self._extension_s and self._left.wait(self._extension_s):
            return
        self._extension_s = 0.0
        if not self._raised:
            signal.pthread_kill(main_thread, signum)  # the second one raises in any case
        if self._left.wait(self._tidy_up_s):
            return
        os.write(2, f"{StopRequested(signum)}, by force: a call did not return\n".encode())
        os._exit(128 + signum)
