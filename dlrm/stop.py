"""Ctrl-C and SIGTERM: leave at once, and leave tidily where that is possible.

Outside the step loop (loading, building, evaluating) the signal raises `StopRequested` at once, wherever
the main thread is. Inside it, the signal is noted and all ranks agree to stop after the same step; a step
that does not come to its end (a peer is gone, the storage hangs) is left by force after a grace time.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import FrameType, TracebackType
from typing import Any, Final, Self

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


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
        grace: how long a deferred stop may wait for the end of a step.
    """

    def __init__(self, grace: timedelta = timedelta(seconds=5)) -> None:
        self._grace = grace
        self._signum: int | None = None
        self._deferring = False
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a signal came on this rank."""
        return self._signum is not None

    def leave(self) -> None:
        """Stop now, because all ranks agreed to.

        Raises:
            StopRequested: always.
        """
        raise StopRequested(self._signum if self._signum is not None else signal.SIGTERM)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Within this block signals are noted, and only after the grace time raised."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            signal.setitimer(signal.ITIMER_REAL, 0)

    def __enter__(self) -> Self:
        """Begin to listen."""
        for signum in SIGNALS:
            self._previous[signum] = signal.signal(signum, self._on_signal)
        self._previous[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_grace_over)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the signals back."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first = self._signum is None
        self._signum = signum
        if not self._deferring:
            raise StopRequested(signum)
        if first:
            signal.setitimer(signal.ITIMER_REAL, self._grace.total_seconds())

    def _on_grace_over(self, signum: int, frame: FrameType | None) -> None:
        if self._deferring and self._signum is not None:
            raise StopRequested(self._signum)
