"""A background thread that stays ahead of its consumer by a bounded number of items.

The rules that keep it from ever hanging anything: the thread is a daemon and is told to stop when
its `Feed` is closed, dropped, or the interpreter exits; every wait wakes up regularly, so that
signals are honoured; an error of the thread is raised again, unchanged, where the consumer waits.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Generic, TypeVar

T = TypeVar("T")

WAKE_UP_S: Final = 0.2
"""How often a waiting thread looks around."""
JOIN_S: Final = 5.0
"""How long closing waits for the item that is being made; a thread stuck in storage is left behind."""


class FeedClosedError(RuntimeError):
    """The consumer waited for an item of a feed that somebody closed."""


class _Shared(Generic[T]):
    """What the two threads share. The maker holds only this, so that a dropped `Feed` can be collected."""

    def __init__(self, ahead: int) -> None:
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.ahead = ahead
        self.closed = False
        self.finished = False
        self.error: BaseException | None = None

    def make(self, produce: Callable[[Callable[[], bool]], Iterator[T]]) -> None:
        """Body of the background thread."""
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

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.items.clear()
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
        self._shared: _Shared[T] = _Shared(ahead)
        thread = threading.Thread(target=self._shared.make, args=(produce,), name=name, daemon=True)
        # Also runs at interpreter exit: native code must not come back into a torn-down interpreter.
        self._finalizer = weakref.finalize(self, _stop, self._shared, thread)
        thread.start()

    def __iter__(self) -> "Feed[T]":
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            FeedClosedError: the feed was closed.
            BaseException: whatever `produce` raised, after the items that it made before.
        """
        shared = self._shared
        with shared.changed:
            while not (shared.items or shared.finished or shared.closed):
                shared.changed.wait(WAKE_UP_S)
            self.check_open()
            if shared.items:
                shared.changed.notify_all()
                return shared.items.popleft()
        if shared.error is not None:
            raise shared.error
        raise StopIteration

    def check_open(self) -> None:
        """Raise FeedClosedError if the feed was closed."""
        if self._shared.closed:
            raise FeedClosedError("the data loader was closed, or began anew, while this iterator was in use")

    def close(self) -> None:
        """Stop the thread and drop what it made. Safe to repeat, and to call from a signal handler."""
        self._finalizer()


def _stop(shared: _Shared[T], thread: threading.Thread) -> None:
    shared.close()
    thread.join(JOIN_S)
