"""Read-ahead: a thread that fetches the row groups that the consumer will request next.

While the consumer works on one row group, the storage already delivers the next one. A limit bounds the
number of row groups that are ready or being fetched. An error is raised when its row group is requested.
"""

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Final

import pyarrow as pa

Fetch = Callable[[], pa.Table | None]

AHEAD: Final = 3
"""Maximum of row groups that are ready or being fetched: the next one and two after it."""
CLOSE_S: Final = 0.5
"""Time that closing waits for the running fetch; a thread that is stuck in storage ends later."""
EXIT_S: Final = 10.0
"""Time that the interpreter's exit waits, since native code must not return into a dead interpreter."""


class _Shared:
    """State shared by the thread and its owner, without a reference to the source, which can be collected."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.fetches: deque[tuple[Future[pa.Table | None], Fetch]] = deque()
        self.futures: OrderedDict[str, Future[pa.Table | None]] = OrderedDict()
        self.closed = False

    def close(self) -> None:
        with self.changed:
            self.closed = True
            for future in self.futures.values():
                future.cancel()
            self.futures.clear()
            self.fetches.clear()
            self.changed.notify_all()


class ReadAhead:
    """Runs fetches in order in a background thread, which starts with the first fetch."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._thread: threading.Thread | None = None

    def begin(self, key: str, fetch: Fetch) -> None:
        """Fetch `key` in the background, unless it is being fetched or `AHEAD` others are waiting."""
        shared = self._shared
        with shared.changed:
            if shared.closed or key in shared.futures or not _has_room(shared.futures):
                return
            future: Future[pa.Table | None] = Future()
            shared.futures[key] = future
            shared.fetches.append((future, fetch))
            shared.changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=_run, args=(shared,), name="cache-read-ahead", daemon=True
                )
                weakref.finalize(self, _finish, shared, self._thread, EXIT_S)
                self._thread.start()

    def take(self, key: str) -> pa.Table | None:
        """Wait for the fetch of `key` and return its table; None if there was no such fetch.

        Raises:
            Exception: the error of the fetch.
        """
        with self._shared.changed:
            future = self._shared.futures.pop(key, None)
        if future is None:
            return None
        try:
            return future.result()
        except CancelledError:  # closed meanwhile
            return None

    def close(self) -> None:
        """Drop all row groups and end the thread."""
        if self._thread is None:
            self._shared.close()
        else:
            _finish(self._shared, self._thread, CLOSE_S)


def _has_room(futures: OrderedDict[str, "Future[pa.Table | None]"]) -> bool:
    """Whether one more fetch may start, after dropping the oldest table that no reader has taken."""
    if len(futures) < AHEAD:
        return True
    forgotten = next((key for key, future in futures.items() if future.done()), None)
    if forgotten is not None:
        del futures[forgotten]
    return forgotten is not None


def _run(shared: _Shared) -> None:
    while True:
        with shared.changed:
            while not (shared.fetches or shared.closed):
                shared.changed.wait()
            if shared.closed:
                return
            future, fetch = shared.fetches.popleft()
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(fetch())
            except BaseException as error:  # raised again when the row group is requested
                future.set_exception(error)
        del future, fetch  # frees the row group and its source while waiting


def _finish(shared: _Shared, thread: threading.Thread, patience_s: float) -> None:
    shared.close()
    if thread is not threading.current_thread():  # the thread itself may drop the last reference
        thread.join(patience_s)
