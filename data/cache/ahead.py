"""Reading ahead of the consumer: one thread that fetches what will be asked for next.

While the consumer works with one row group, the storage already delivers the next one. What is ready
or under way is bounded by a number of row groups; an error waits for whoever asks for its row group.
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
"""Row groups that are ready or under way at most: the one asked for next, and two after it."""
CLOSE_S: Final = 0.5
"""How long closing waits for the row group under way; a thread that is stuck in storage ends later."""
EXIT_S: Final = 10.0
"""How long the interpreter's exit waits for it: native code must not return into a dead interpreter."""


class _Shared:
    """What thread and owner share. It knows no source once a fetch is over, so that one can be collected."""

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
    """Runs fetches in the order in which they are begun, in a thread that starts with the first one."""

    def __init__(self) -> None:
        self._shared = _Shared()
        self._thread: threading.Thread | None = None

    def begin(self, key: str, fetch: Fetch) -> None:
        """Fetch `key` in the background, unless it is under way, or `AHEAD` others are still to come."""
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
        """What was fetched for `key`, waiting for it if need be; None if nothing was begun, or it gave none.

        Raises:
            Exception: whatever the fetch raised.
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
        """Drop what is ready, begin nothing more, end the thread."""
        if self._thread is None:
            self._shared.close()
        else:
            _finish(self._shared, self._thread, CLOSE_S)


def _has_room(futures: OrderedDict[str, "Future[pa.Table | None]"]) -> bool:
    """Whether one more may begin; what a reader that went away never took makes room, the oldest first."""
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
            except BaseException as error:  # raised again where the row group is asked for
                future.set_exception(error)
        del future, fetch  # and with them the row group and its source, while waiting for the next one


def _finish(shared: _Shared, thread: threading.Thread, patience_s: float) -> None:
    shared.close()
    if thread is not threading.current_thread():  # which may drop the last reference to its source
        thread.join(patience_s)
