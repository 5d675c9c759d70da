"""An executor of worker processes, which end with their parent and whose death is an error.

Each worker (`data.jobs.worker`) has a connection to the parent and runs one call at a time; a thread of the
parent waits for its answer. The standard input of a worker is a pipe of the parent, which ends with the
parent, even by `kill -9`, so that the worker exits at once. `ProcessPoolExecutor` is not used: its workers
stay when their parent is killed, import the caller's main module, and do not say how one of them died.
Libraries in the workers run single-threaded, since the processes use all cores.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import connection
from queue import SimpleQueue
from typing import Any, Final, ParamSpec, TypeVar

from data.jobs.worker import ERROR, PROGRESS

_WORKER_ENVIRONMENT: Final = {
    "POLARS_MAX_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # glibc: keep freed blocks; returning them costs page faults, a tenth of all time
    "MALLOC_TRIM_THRESHOLD_": str(64 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
}

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class WorkerDiedError(ChildProcessError):
    """Raised when a worker process was killed or crashed."""


@dataclass(frozen=True)
class _Worker:
    process: "subprocess.Popen[bytes]"
    pipe: "connection.Connection[object, object]"


class WorkerPool(Executor):
    """Runs calls in worker processes, started in the order in which they are submitted.

    A `with` block waits for all calls at its end; if an exception leaves it, it kills the processes at once.

    Args:
        num_processes: number of workers.
        preload: module that they import at their start.
    """

    def __init__(self, num_processes: int, preload: str) -> None:
        self.messages: SimpleQueue[Any] = SimpleQueue()
        """What calls sent by `data.jobs.worker.report`; all of a call before its future is done."""
        self._workers = [_start_worker(preload) for _ in range(num_processes)]
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_processes)

    def submit(
        self, fn: Callable[_Arguments, _Result], /, *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Future[_Result]:
        """Run a picklable call in a worker process.

        The future raises `WorkerDiedError` if the process was killed or crashed.
        """
        return self._threads.submit(self._call, fn, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the processes when all calls are done, or at once without `wait`."""
        self._threads.shutdown(wait=wait, cancel_futures=cancel_futures or not wait)
        for worker in self._workers:
            worker.process.kill()
        self._threads.shutdown()
        for worker in self._workers:
            worker.process.communicate()
            worker.pipe.close()

    def __exit__(self, exception_type: object, *_: object) -> None:
        self.shutdown(wait=exception_type is None)

    def _call(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        worker = self._idle.get()
        try:
            _send(worker, (fn, args, kwargs))
            while (answer := _receive(worker))[0] == PROGRESS:
                self.messages.put(answer[1])
        finally:
            self._idle.put(worker)
        kind, content = answer
        if kind == ERROR:
            raise content
        return content


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


def _send(worker: _Worker, call: object) -> None:
    try:
        worker.pipe.send(call)
    except (BrokenPipeError, ConnectionResetError) as error:
        raise _death(worker) from error


def _receive(worker: _Worker) -> tuple[str, Any]:
    try:
        return worker.pipe.recv()  # type: ignore[return-value]  # by worker.main
    except (EOFError, ConnectionResetError) as error:
        raise _death(worker) from error


def _death(worker: _Worker) -> WorkerDiedError:
    code = worker.process.wait(timeout=60)
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    hint = " (the kernel does that when memory runs out: try fewer --processes)"
    return WorkerDiedError(
        f"worker process {worker.process.pid} ended {how}{hint if code == -signal.SIGKILL else ''}"
    )
