"""Prefetching: a background thread that makes a bounded number of items ahead of its consumer.

These rules prevent hangs: the thread is a daemon and stops when its `Feed` is closed or dropped or the
interpreter exits; every wait has a timeout, so that signals are handled; and an error of the thread is raised
again, unchanged, in the waiting consumer.
"""

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

WAKE_UP_S: Final = 0.2
"""Timeout of a single wait."""
CLOSE_S: Final = 0.5
"""Time that closing waits for the current item; a thread that is stuck in storage ends later."""
EXIT_S: Final = 10.0
"""Time that exit waits for all threads: native code must not return into a dead interpreter."""


class FeedClosedError(RuntimeError):
    """Raised in a consumer that waits for an item of a closed feed."""


class _Maker(Generic[T]):
    """The background thread and its shared state, without a reference to its `Feed`."""

    def __init__(self, produce: Callable[[Callable[[], bool]], Iterator[T]], ahead: int, name: str) -> None:
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.ahead = ahead
        self.closed = False
        self.finished = False
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._make, args=(produce,), name=name, daemon=True)

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
            self.changed.notify_all()

    def has_ended(self) -> bool:
        return self.thread.ident is not None and not self.thread.is_alive()

    def _make(self, produce: Callable[[Callable[[], bool]], Iterator[T]]) -> None:
        try:
            items = produce(lambda: self.closed)
            while self._wait_for_room():
                item = next(items, None)
                with self.changed:
                    if item is None:
                        break
                    self.items.append(item)
                    self.changed.notify_all()
        except BaseException as error:  # raised again in the consumer's thread
            self.error = error
        finally:
            with self.changed:
                self.finished = True
                self.changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self.changed:
            while len(self.items) >= self.ahead and not self.closed:
                self.changed.wait(WAKE_UP_S)
            return not self.closed


class Feed(Generic[T]):
    """Iterator over items that a background thread makes ahead.

    Args:
        produce: called in the thread with a function that returns whether the feed was closed, to be checked
            between slow operations; yields the items, none of which is None.
        ahead: maximum of ready items; the next item is started when there is room for it.
        name: name of the thread.
    """

    def __init__(self, produce: Callable[[Callable[[], bool]], Iterator[T]], ahead: int, name: str) -> None:
        self._maker = _Maker(produce, ahead, name)
        weakref.finalize(self, self._maker.close)

    def start(self) -> None:
        """Start the thread; separate from construction, so that a signal handler can close the feed."""
        _started.difference_update([maker for maker in _started if maker.has_ended()])
        _started.add(self._maker)
        self._maker.thread.start()

    def __iter__(self) -> "Feed[T]":
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            FeedClosedError: the feed was closed.
            BaseException: the error of `produce`, after all items before it.
        """
        maker = self._maker
        with maker.changed:
            while not (maker.items or maker.finished or maker.closed):
                maker.changed.wait(WAKE_UP_S)
            self.check_open()
            if maker.items:
                maker.changed.notify_all()
                return maker.items.popleft()
        if maker.error is not None:
            raise maker.error
        raise StopIteration

    def check_open(self) -> None:
        """Raise FeedClosedError if the feed was closed."""
        if self._maker.closed:
            raise FeedClosedError("the data loader was closed or restarted while this iterator was in use")

    def close(self) -> None:
        """Stop the thread and drop its items. Safe to repeat, and to call from a signal handler."""
        self._maker.close()
        if self._maker.thread.is_alive():
            self._maker.thread.join(CLOSE_S)


_started: set[_Maker[Any]] = set()
"""Makers whose threads may be alive. A thread does not remove itself, because exit has to wait until its
frames and their native objects are gone."""


@atexit.register
def _stop_all() -> None:
    makers = list(_started)
    for maker in makers:
        maker.close()
    deadline = time.monotonic() + EXIT_S
    for maker in makers:
        maker.thread.join(max(0.0, deadline - time.monotonic()))
