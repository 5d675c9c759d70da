"""Tasks on worker processes that cannot be orphaned and cannot die unnoticed.

Each worker has a pipe to the parent and does one task at a time. It watches for its parent: when
that is gone, even by `kill -9`, the worker exits at once. The parent watches its workers: one that
dies is an error that says so. Libraries in the workers run single-threaded; processes are the parallelism.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.context import SpawnProcess
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
    process: SpawnProcess
    pipe: "connection.Connection[object, object]"
    task: int | None = None


class WorkerPool:
    """A few processes that run tasks. A context manager: leaving it ends the processes.

    Args:
        num_processes: how many.
    """

    def __init__(self, num_processes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._workers = []
        with _environment(_WORKER_ENVIRONMENT):
            for _ in range(num_processes):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self._workers.append(_Worker(process, ours))

    def __enter__(self) -> "WorkerPool":
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.pipe.close()
            worker.process.close()

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
    worker.process.join(timeout=5)
    code = worker.process.exitcode
    how = f"with exit code {code}"
    if code is not None and code < 0:
        how = f"by signal {signal.Signals(-code).name}"
    hint = (
        " (the kernel does that when memory runs out; try fewer --processes)"
        if code == -signal.SIGKILL
        else ""
    )
    return WorkerDiedError(f"worker process {worker.process.pid} ended {how}{hint}")


def _serve(pipe: "connection.Connection[object, object]") -> None:
    """Life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    while True:
        task: Task = pipe.recv()  # type: ignore[assignment]
        try:
            task.run(pipe.send)
            pipe.send(None)
        except (ValueError, OSError) as error:
            pipe.send(error)
        except Exception:
            pipe.send(RuntimeError(f"a worker process failed:\n{traceback.format_exc()}"))


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    """Environment variables for processes started inside the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
