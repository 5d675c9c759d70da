"""Runs tasks on worker processes, which end with their parent and whose death is an error.

Each worker (`data.jobs.worker`) has a connection to the parent and runs one task at a time. Its standard
input is a pipe of the parent, which ends with the parent, even by `kill -9`, so that the worker exits at
once. The parent raises an error if a worker dies. Libraries in the workers run single-threaded, since the
processes use all cores. Workers are separate programs instead of `multiprocessing` processes, which would
import the caller's main module.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any, Final, Protocol

TICK_S: Final = 0.5
"""Interval of progress calls without messages of workers."""

_WORKER_ENVIRONMENT: Final = {
    "POLARS_MAX_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # glibc: keep freed blocks; returning them costs page faults, a tenth of all time
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


class Task(Protocol):
    """Picklable work for a worker, which writes its result to disk."""

    def run(self, report: Callable[[Any], object]) -> None:
        """Do the work, and report progress: anything picklable but None and exceptions."""


class WorkerDiedError(ChildProcessError):
    """Raised when a worker process was killed or crashed."""


@dataclass
class _Worker:
    process: "subprocess.Popen[bytes]"
    pipe: "connection.Connection[object, object]"
    task: int | None = None


class WorkerPool:
    """Worker processes that run tasks; a context manager, which ends the processes.

    Args:
        num_processes: number of workers.
        preload: module that they import at their start.
    """

    def __init__(self, num_processes: int, preload: str) -> None:
        self._workers = [_start_worker(preload) for _ in range(num_processes)]

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.communicate()
            worker.pipe.close()

    def run(self, tasks: Sequence[Task], on_progress: Callable[[int, Any], bool]) -> None:
        """Run the tasks, started in order.

        Args:
            tasks: the tasks.
            on_progress: called with a task's position and what it reported, or with -1 and None every
                `TICK_S`. When it returns False no further task is started; those that run are finished.

        Raises:
            WorkerDiedError: a worker was killed or crashed.
            Exception: the error of a task.
        """
        waiting = list(range(len(tasks)))
        waiting.reverse()
        continues = True
        while True:
            for worker in self._workers:
                if worker.task is None and waiting and continues:
                    worker.task = waiting.pop()
                    _send(worker, tasks[worker.task])
            busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
            if not busy:
                return
            ready = connection.wait(list(busy), timeout=TICK_S)
            continues &= on_progress(-1, None)
            for pipe in ready:
                worker = busy[pipe]  # type: ignore[index]  # wait() is typed for sockets too
                position, message = worker.task, _receive(worker)
                if isinstance(message, BaseException):
                    raise message
                if message is None:
                    worker.task = None
                elif position is not None:
                    continues &= on_progress(position, message)


def _start_worker(preload: str) -> _Worker:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, **_WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "data.jobs.worker", str(theirs.fileno()), preload],
            stdin=subprocess.PIPE,
            pass_fds=[theirs.fileno()],
            env=environment,
        )
    return _Worker(process, connection.Connection(ours.detach()))


def _send(worker: _Worker, task: Task) -> None:
    try:
        worker.pipe.send(task)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _death(worker) from error


def _receive(worker: _Worker) -> object:
    try:
        return worker.pipe.recv()
    except (EOFError, ConnectionResetError) as error:
        raise _death(worker) from error


def _death(worker: _Worker) -> WorkerDiedError:
    code = worker.process.wait(timeout=60)
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    hint = " (the kernel does that when memory runs out: try fewer --processes)"
    return WorkerDiedError(
        f"worker process {worker.process.pid} ended {how}{hint if code == -signal.SIGKILL else ''}"
    )
