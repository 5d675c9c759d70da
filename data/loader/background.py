"""Background threads, and prefetching with one.

These rules prevent hangs: the threads are daemons and end when their owner is closed or dropped or the
interpreter exits; consumers wait with a timeout, so that closing wakes them; nothing here takes a lock that a
signal handler could find taken; and an error of the thread is raised again, unchanged, in the consumer.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from functools import partial
from itertools import chain
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

T = TypeVar("T")

WAKE_UP_S: Final = 0.2
"""Timeout of a single wait."""
CLOSE_S: Final = 0.5
"""Time that closing waits for the current item; a thread that is stuck in storage ends later."""
EXIT_S: Final = 10.0
"""Time that exit waits for a thread: native code must not return into a dead interpreter."""


class FeedClosedError(RuntimeError):
    """Raised in a consumer that waits for an item of a closed feed."""


class _Shared:
    """State of a background thread, without a reference to its owner."""

    def __init__(self, name: str, finish: bool) -> None:
        self.finish = finish
        self.closed = False
        self.tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def end(self) -> None:
        """End the thread after the current task, or with `finish` after all."""
        self.closed = True
        while not self.finish:
            try:
                entry = self.tasks.get_nowait()
            except Empty:
                break
            if entry is not None:
                entry[0].cancel()
        self.tasks.put(None)

    def join(self, patience_s: float) -> None:
        if self.thread.is_alive() and self.thread is not threading.current_thread():
            self.thread.join(patience_s)

    def drop(self) -> None:
        """End the thread of an owner that was dropped, or that exists when the interpreter exits."""
        self.end()
        if not threading.main_thread().is_alive():
            self.join(EXIT_S)

    def _run(self) -> None:
        while (entry := self.tasks.get()) is not None:
            future, task = entry
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task())
                except BaseException as error:  # raised again in the consumer's thread
                    future.set_exception(error)
            del entry, future, task  # frees their memory while waiting


class Background:
    """Runs tasks in order in a background thread, which starts with the first task.

    Args:
        name: name of the thread.
        finish: finish the waiting tasks when the thread is to end, instead of cancelling them.
    """

    def __init__(self, name: str, *, finish: bool = False) -> None:
        self._shared = _Shared(name, finish)
        self._starting = threading.Lock()
        weakref.finalize(self, self._shared.drop)

    @property
    def closed(self) -> bool:
        """Whether the thread was told to end."""
        return self._shared.closed

    @property
    def num_waiting(self) -> int:
        """Tasks that have not started."""
        return self._shared.tasks.qsize()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; its future is cancelled if the thread has to end before it."""
        future: Future[T] = Future()
        with self._starting:
            if self._shared.thread.ident is None:
                self._shared.thread.start()
        self._shared.tasks.put((future, task))
        if self._shared.closed:  # perhaps too late to be run or cancelled by the thread
            future.cancel()
        return future

    def close(self, patience_s: float) -> None:
        """End the thread. Safe to repeat, and to call from a signal handler."""
        self._shared.end()
        self._shared.join(patience_s)


class Feed(Generic[T]):
    """Iterator over items that a background thread makes ahead.

    Args:
        produce: called in the thread with a function that returns whether the feed was closed, to be checked
            between slow operations; yields the items, none of which is None.
        ahead: maximum of ready items; the next item is started when there is room for it.
        name: name of the thread.
    """

    def __init__(self, produce: Callable[[Callable[[], bool]], Iterator[T]], ahead: int, name: str) -> None:
        self._background = Background(name)
        shared = self._background._shared
        items = chain.from_iterable(map(produce, [lambda: shared.closed]))  # calls `produce` in the thread
        self._make: Callable[[], T | None] = partial(next, items, None)
        self._ahead = ahead
        self._items: deque[Future[T | None]] = deque()

    def start(self) -> None:
        """Start the thread; separate from construction, so that a signal handler can close the feed."""
        self._items.extend(self._background.submit(self._make) for _ in range(self._ahead))

    def __iter__(self) -> "Feed[T]":
        return self

    def __next__(self) -> T:
        """The next item.

        Raises:
            FeedClosedError: the feed was closed.
            BaseException: the error of `produce`, after all items before it.
        """
        items = self._items
        self.check_open()
        future = items.popleft()
        while not (future.done() or self._background.closed):
            wait([future], WAKE_UP_S)
        self.check_open()
        items.append(self._background.submit(self._make))
        item = future.result()
        if item is None:
            raise StopIteration
        return item

    @property
    def is_open(self) -> bool:
        """Whether the feed was not closed."""
        return not self._background.closed

    def check_open(self) -> None:
        """Raise FeedClosedError if the feed was closed."""
        if not self.is_open:
            raise FeedClosedError("the data loader was closed or restarted while this iterator was in use")

    def close(self) -> None:
        """Stop the thread and drop its items. Safe to repeat, and to call from a signal handler."""
        self._background.close(CLOSE_S)
        self._items = deque()
