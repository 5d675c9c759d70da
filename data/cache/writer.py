"""A background thread that stores row groups, so that no reader waits for it."""

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
"""Maximum of row groups that wait for storing. If storing is slower than fetching, others are not cached."""
CLOSE_S: Final = 30.0
"""Time that closing waits for queued row groups."""
EXIT_S: Final = 5.0
"""Time that the interpreter's exit waits for a writer that was not closed."""


class BackgroundWriter:
    """Runs tasks in order in a background thread, which starts with the first task."""

    def __init__(self) -> None:
        self._tasks: queue.Queue[Task | None] = queue.Queue(maxsize=QUEUED)
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, task: Task) -> bool:
        """Queue a task; returns False if the queue is full or closed."""
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
        del task  # frees the row group while waiting


def _finish(tasks: queue.Queue[Task | None], thread: threading.Thread, patience_s: float) -> None:
    with contextlib.suppress(queue.Full):
        tasks.put(None, timeout=patience_s)
        thread.join(patience_s)
