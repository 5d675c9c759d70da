"""Tasks on worker processes that cannot be orphaned and cannot die unnoticed.

Each worker (`data.prepare.worker`) has a connection to the parent and does one task at a time. Its
standard input is a pipe that the parent holds: when the parent is gone, even by `kill -9`, that ends
and the worker exits at once. The parent watches its workers: one that dies is an error that says so.
Libraries in the workers run single-threaded; processes are the parallelism. Workers are programs of
their own rather than `multiprocessing` ones, because those would first import the caller's main
module again, whatever it drags in.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import connection
from typing import Final, Protocol

from data.prepare.progress import Progress, Report

TICK_S: Final = 0.5
"""How often the parent looks up while the workers are silent."""

_WORKER_ENVIRONMENT: Final = {
    "POLARS_MAX_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # glibc: keep freed blocks for the next ones; giving them back costs page faults, a tenth of all time.
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}


class Task(Protocol):
    """Work for a worker; picklable. It is expected to leave its result on disk."""

    def run(self, report: Report) -> None:
        """Do it and tell how far it is."""


class WorkerDiedError(RuntimeError):
    """A worker process ended without saying why."""


@dataclass
class _Worker:
    process: "subprocess.Popen[bytes]"
    pipe: "connection.Connection[object, object]"
    task: int | None = None


class WorkerPool:
    """A few processes that run tasks. A context manager: leaving it ends the processes.

    Args:
        num_processes: how many.
    """

    def __init__(self, num_processes: int) -> None:
        self._workers = [_start_worker() for _ in range(num_processes)]

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.communicate()
            worker.pipe.close()

    def run(self, tasks: Sequence[Task], on_progress: Callable[[int, Progress | None], bool]) -> None:
        """Run the tasks, started in order.

        Args:
            tasks: what to do.
            on_progress: called with a task's position and what it reported, or with -1 and None every
                `TICK_S`. When it returns False no further task is started; those that run are finished.

        Raises:
            WorkerDiedError: a worker was killed or crashed.
            Exception: what a task raised.
        """
        waiting = list(range(len(tasks)))
        waiting.reverse()
        go_on = True
        while True:
            for worker in self._workers:
                if worker.task is None and waiting and go_on:
                    worker.task = waiting.pop()
                    _send(worker, tasks[worker.task])
            busy = {worker.pipe: worker for worker in self._workers if worker.task is not None}
            if not busy:
                return
            ready = connection.wait(list(busy), timeout=TICK_S)
            go_on &= on_progress(-1, None)
            for pipe in ready:
                worker = busy[pipe]  # type: ignore[index]  # wait() is typed for sockets too
                position, message = worker.task, _receive(worker)
                if isinstance(message, BaseException):
                    raise message
                if message is None:
                    worker.task = None
                elif position is not None:
                    assert isinstance(message, Progress)
                    go_on &= on_progress(position, message)


def _start_worker() -> _Worker:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, **_WORKER_ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "data.prepare.worker", str(theirs.fileno())],
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
