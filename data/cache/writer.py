"""A background thread that stores what was fetched, so that storing is never waited for."""

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Final

logger = logging.getLogger(__name__)

Task = Callable[[], None]

QUEUED: Final = 4
"""Row groups that may wait to be stored. When storing is slower than fetching, more are not kept at all."""
CLOSE_S: Final = 30.0
"""How long closing waits for the row groups that are queued."""
EXIT_S: Final = 5.0
"""How long the interpreter's exit waits, if nobody closed the writer."""


class BackgroundWriter:
    """Runs tasks one after the other in a thread that starts with the first one."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue(maxsize=QUEUED)
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, task: Task) -> bool:
        """Queue a task; False if it is not taken, because the queue is full or closed."""
        if self._closed:
            return False
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._tasks,), name="cache-writer", daemon=True
            )
            weakref.finalize(self, _finish, self._tasks, self._thread, EXIT_S)
            self._thread.start()
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Finish the queued tasks and end the thread."""
        self._closed = True
        if self._thread is not None:
            _finish(self._tasks, self._thread, CLOSE_S)


def _run(tasks: queue.Queue[Task | None]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except Exception:
            logger.exception("a row group could not be cached; it stays on the remote storage")
        tasks.task_done()
        del task  # and with it the row group, while waiting for the next one


def _finish(tasks: queue.Queue[Task | None], thread: threading.Thread, patience_s: float) -> None:
    with contextlib.suppress(queue.Full):
        tasks.put(None, timeout=patience_s)
        thread.join(patience_s)
