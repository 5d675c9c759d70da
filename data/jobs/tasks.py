"""Runs the tasks of a job on any executor, and brings their progress back.

A task is picklable and writes its result to files. It may run more than once (after the death of a machine
or of the whole job), and then writes the same bytes again.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol

from data.jobs import worker
from data.jobs.pool import WorkerPool

TICK_S: Final = 0.2
"""Longest interval between two looks at the progress."""

Report = Callable[[Any], object]


class Task(Protocol):
    """Picklable work, which writes its result to files."""

    def run(self, report: Report) -> None:
        """Do the work, and report progress: anything picklable but None."""


def _keep_quiet(_: Any) -> None:
    pass


@dataclass(frozen=True, kw_only=True)
class Workers:
    """An executor, and how messages of its calls come back."""

    executor: Executor
    """Where tasks run."""
    count: Callable[[], int]
    """How many of them run at once; raises if none ever will."""
    send: Report = _keep_quiet
    """Sends a message from a call that runs on the executor; picklable. By default none is sent."""
    messages: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    """Where these messages arrive."""

    def run(self, tasks: Sequence[Task], on_progress: Callable[[int, Any], bool]) -> None:
        """Run the tasks, started in order.

        Args:
            tasks: the tasks.
            on_progress: called with a task's position and what it reported, or with -1 and None every
                `TICK_S` at least. When it returns False no further task is started; those that run are
                finished.

        Raises:
            WorkerDiedError: a worker was killed or crashed.
            Exception: the error of a task.
        """
        waiting = deque(enumerate(tasks))
        running: set[Future[None]] = set()
        continues = True
        while True:
            free = self.count() - len(running)  # asked for every time, since it tells when all are lost
            while continues and waiting and free > 0:
                position, task = waiting.popleft()
                running.add(self.executor.submit(_run, task, position, self.send))
                free -= 1
            if not running:
                return
            done, running = wait(running, TICK_S, FIRST_COMPLETED)
            continues &= on_progress(-1, None)
            for position, progress in self._arrived():
                continues &= on_progress(position, progress)
            for future in done:
                future.result()

    def _arrived(self) -> list[tuple[int, Any]]:
        arrived = []
        while True:
            try:
                arrived.append(self.messages.get_nowait())
            except Empty:
                return arrived


def _run(task: Task, position: int, send: Report) -> None:
    task.run(lambda progress: send((position, progress)))


@contextmanager
def local_workers(num_processes: int, preload: str) -> Iterator[Workers]:
    """Worker processes on this machine; see `WorkerPool`."""
    with WorkerPool(num_processes, preload) as pool:
        yield Workers(executor=pool, count=lambda: num_processes, send=worker.report, messages=pool.messages)
