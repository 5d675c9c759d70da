"""Runs tasks on a Dask cluster, by the executor of its client.

Dask runs a task again whose worker died; it is an error if that happens several times to the same task. A
driver that ends, even by `kill -9`, takes its tasks along: each looks for that when it reports progress.
"""

import logging
import pickle
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final

from data.jobs.files import durable_file
from data.jobs.location import Location
from data.jobs.needs import Needs, refuse_once, versions
from data.jobs.tasks import Workers

CONNECT_S: Final = 20.0
"""Time limit for reaching the scheduler."""
WORKERS_S: Final = 60.0
"""How long a cluster may be without any worker."""
ENDED_S: Final = 120.0
"""How long tasks of an ended job may take to notice it."""
DASK_SHARE: Final = 0.8
"""Share of a worker's memory limit beyond which Dask starts no task there."""
TOKEN_NAME: Final = "shared"


WorkersFor = Callable[[int, Location, Sequence[tuple[Location, int]]], AbstractContextManager[Workers]]
"""Starts workers, by the arguments of `DaskCluster.workers`."""


class ClusterError(ChildProcessError):
    """Raised when the scheduler or all workers are lost."""


@dataclass(frozen=True)
class DaskCluster:
    """A cluster with at least one worker; made by `connected`."""

    client: Any
    """The `distributed.Client`."""
    address: str
    """Address of the scheduler."""
    most_threads: int
    """Threads of the worker with the most, each of which runs a task."""

    @contextmanager
    def workers(
        self, num_tasks: int, state: Location, inputs: Sequence[tuple[Location, int]]
    ) -> Iterator[Workers]:
        """The workers, once it is known that all of them have what the tasks of a job need.

        Args:
            num_tasks: how many tasks at once fit into the memory of a worker.
            state: folder of the job's state, which exists.
            inputs: the input files with their sizes in bytes.

        Raises:
            ValueError: some lack something; the message says what to do.
            ClusterError: within the block, the scheduler or all workers were lost.
        """
        if num_tasks < self.most_threads:
            raise ValueError(
                f"{num_tasks} tasks fit into --memory at once, and a Dask worker has {self.most_threads} "
                "threads: give more --memory, or start workers with fewer --nthreads"
            )
        needs = _needs(state, inputs)
        self._refuse_unfit(needs)
        self._wait_for_ended_jobs()
        topic = f"data-jobs-{secrets.token_hex(8)}"
        messages: SimpleQueue[Any] = SimpleQueue()
        self.client.subscribe_topic(topic, lambda event: messages.put(pickle.loads(event[1])))
        try:
            yield Workers(
                executor=_CheckedExecutor(self.client.get_executor(pure=False), needs),
                count=_Threads(self.client, self.address),
                send=_Sender(topic),
                messages=messages,
            )
        except CancelledError as error:
            raise ClusterError(f"the scheduler at {self.address} is gone") from error
        except Exception as error:
            if type(error).__name__ != "KilledWorker":
                raise
            raise ClusterError(
                f"several workers died in one task ({_one_line(error)}). The kernel or Dask kills them when "
                "memory runs out: try a lower --memory, or workers with fewer threads"
            ) from error

    def _wait_for_ended_jobs(self) -> None:
        """Wait for tasks of a driver that was killed, which would write into the same folder."""
        deadline = time.monotonic() + ENDED_S
        while any(self.client.run(_num_ended).values()):
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"tasks of a job that has ended still run on the cluster at {self.address}"
                )
            time.sleep(0.1)

    def _refuse_unfit(self, needs: Needs) -> None:
        answers = self.client.run(needs.problem, on_error="return")
        for worker, problem in answers.items():
            if isinstance(problem, ImportError | AttributeError):
                problem = f"lacks this package ({_one_line(problem)}): install it there"  # noqa: PLW2901
            elif isinstance(problem, BaseException):
                raise problem
            if problem is not None:
                raise ValueError(f"the Dask worker {worker} {problem}")


@contextmanager
def connected(address: str, memory_bytes: int) -> Iterator[DaskCluster]:
    """A connection to a Dask cluster.

    Args:
        address: of its scheduler, e.g. `tcp://HOST:8786`.
        memory_bytes: what the tasks of a worker may take.

    Raises:
        ValueError: Dask is not installed, no scheduler answers at the address, or it has no workers with so
            much memory.
    """
    try:
        from distributed import Client  # noqa: PLC0415  # an optional dependency
    except ImportError as error:
        raise ValueError('--cluster needs Dask; install it with: pip install ".[cluster]"') from error
    where = re.fullmatch(r"(?:tcp|tls|wss?)://\[?([^/]+?)\]?:(\d+)", address)
    if where is None:
        raise ValueError(
            f"--cluster takes the address of a Dask scheduler such as tcp://HOST:8786, not {address!r}"
        )
    for name in ("distributed", "distributed.client", "tornado.application"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what is lost, we tell in one line
    try:
        socket.create_connection((where[1], int(where[2])), CONNECT_S).close()  # Dask would try again
        client: Any = Client(address, timeout=CONNECT_S, set_as_default=False)  # type: ignore[no-untyped-call]
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"no Dask scheduler answers at {address} ({_one_line(error)}); start one with `dask scheduler` "
            "and give its address with --cluster"
        ) from error
    with client:
        try:
            client.wait_for_workers(1, timeout=WORKERS_S)
        except TimeoutError as error:
            raise ValueError(
                f"the scheduler at {address} has no workers; start some with `dask worker {address}`"
            ) from error
        workers = client.scheduler_info()["workers"].values()
        _refuse_little_memory(workers, memory_bytes)
        yield DaskCluster(client, address, max(worker["nthreads"] for worker in workers))


def _refuse_little_memory(workers: Any, memory_bytes: int) -> None:
    least = min((worker["memory_limit"] for worker in workers if worker["memory_limit"]), default=None)
    if least is not None and memory_bytes > DASK_SHARE * least:
        raise ValueError(
            f"--memory {memory_bytes >> 20}M is more than {DASK_SHARE:.0%} of the {least >> 20} MiB that "
            f"Dask allows a worker; give --memory {int(DASK_SHARE * least) >> 20}M, or start workers with a "
            "higher --memory-limit"
        )


def _needs(state: Location, inputs: Sequence[tuple[Location, int]]) -> Needs:
    local = tuple((file, num_bytes) for file, num_bytes in inputs if file.local is not None)
    if state.local is None:
        return Needs(versions(), local)
    token, content = state / TOKEN_NAME, secrets.token_hex(16).encode()
    with durable_file(token) as sink:
        sink.write(content)
    return Needs(versions(), local, (token, content))


class _CheckedExecutor(Executor):
    """Runs calls on workers that have what they need, also on those that join the cluster later."""

    def __init__(self, executor: Executor, needs: Needs) -> None:
        self._executor, self._needs = executor, needs

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """See `Executor.submit`."""
        return self._executor.submit(_checked, self._needs, fn, args, kwargs)


def _num_ended(dask_worker: Any) -> int:
    """Calls of `_checked` that a worker still runs although their job has ended."""
    tasks = dask_worker.state.tasks.values()
    return sum(task.state == "cancelled" and str(task.key).startswith("_checked") for task in tasks)


def _checked(needs: Needs, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    refuse_once(needs)
    return fn(*args, **kwargs)


class _Threads:
    """Number of threads of all workers, which may come and go."""

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        self._seen_s = time.monotonic()

    def __call__(self) -> int:
        try:
            num_threads: int = sum(self._client.nthreads().values())
        except (OSError, TimeoutError) as error:
            raise ClusterError(f"the scheduler at {self._address} is gone ({_one_line(error)})") from error
        if num_threads:
            self._seen_s = time.monotonic()
        elif time.monotonic() - self._seen_s > WORKERS_S:
            raise ClusterError(f"the scheduler at {self._address} has had no worker for {WORKERS_S:g} s")
        return num_threads


@dataclass(frozen=True)
class _Sender:
    """Sends messages of tasks through the scheduler, and ends tasks whose job has ended."""

    topic: str

    def __call__(self, message: Any) -> None:
        from distributed import get_worker  # noqa: PLC0415  # only where there is a cluster

        worker = get_worker()
        task = worker.state.tasks.get(worker.get_current_task())
        if task is None or task.state == "cancelled":
            raise CancelledError("the job of this task has ended")
        worker.log_event(self.topic, pickle.dumps(message))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
