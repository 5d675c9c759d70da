"""A background thread that stays ahead of its consumer by a bounded number of items.

The rules that keep it from ever hanging anything: the thread is a daemon and is told to stop when
its `Feed` is closed, dropped, or the interpreter exits; every wait wakes up regularly, so that
signals are honoured; an error of the thread is raised again, unchanged, where the consumer waits.
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
"""How often a waiting thread looks around."""
CLOSE_S: Final = 0.5
"""How long closing waits for the item that is being made; a thread that is stuck in storage ends later."""
EXIT_S: Final = 10.0
"""How long exiting waits for all of them: native code must not return into a dead interpreter."""


class FeedClosedError(RuntimeError):
    """The consumer waited for an item of a feed that somebody closed."""


class _Maker(Generic[T]):
    """The background thread and what it shares. It does not know its `Feed`, so that one can be collected."""

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
    """Items made ahead by a background thread.

    Args:
        produce: called in the thread with a function that says whether the feed was closed, which it
            should ask between slow operations; it yields the items, none of which is None.
        ahead: items that wait ready at most; another one is begun only when there is room for it.
        name: name of the thread.
    """

    def __init__(self, produce: Callable[[Callable[[], bool]], Iterator[T]], ahead: int, name: str) -> None:
        self._maker = _Maker(produce, ahead, name)
        weakref.finalize(self, self._maker.close)

    def start(self) -> None:
        """Start the thread. Apart from construction, so that a signal handler can already close the feed."""
        _started.difference_update([maker for maker in _started if maker.has_ended()])
        _started.add(self._maker)
        self._maker.thread.start()

    def __iter__(self) -> "Feed[T]":
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            FeedClosedError: the feed was closed.
            BaseException: whatever `produce` raised, after the items that it made before.
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
            raise FeedClosedError("the data loader was closed, or began anew, while this iterator was in use")

    def close(self) -> None:
        """Stop the thread and drop what it made. Safe to repeat, and to call from a signal handler."""
        self._maker.close()
        if self._maker.thread.is_alive():
            self._maker.thread.join(CLOSE_S)


_started: set[_Maker[Any]] = set()
"""All whose thread may be alive. A thread does not take itself out: to the very end, when its frames and the
native objects in them are gone, exiting has to wait for it."""


@atexit.register
def _stop_all() -> None:
    makers = list(_started)
    for maker in makers:
        maker.close()
    deadline = time.monotonic() + EXIT_S
    for maker in makers:
        maker.thread.join(max(0.0, deadline - time.monotonic()))
