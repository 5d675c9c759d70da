"""Workers in a network with links of a chosen speed, or without one, which wait for requests of the launcher.

A worker module reads its job as JSON from the command line, joins the process group, and then serves
requests, which are lines of JSON on its standard input
(`experiments.harness.worker_process.answer_requests`). Rank 0 answers each request with a line on its
standard output.
"""

import json
import select
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from time import monotonic
from typing import IO, Any, Final, Self

from experiments.harness.launch import free_port, worker_command, worker_environment
from experiments.harness.network import Network, rank_environment
from experiments.harness.record import Record, Row

CORES: Final = 2
"""Cores that all workers share."""
ANSWER: Final = "answer: "
"""Prefix of the lines of rank 0 that answer a request."""
ANSWER_TIMEOUT_S: Final = 1800.0
"""Timeout of an answer."""
END_TIMEOUT_S: Final = 20.0
"""Time for all workers to end before they are killed."""


Measurements = Mapping[str, Callable[["Workers", Network], Row]]
"""What workers in a network measure, by the key of its row."""


def measure_missing(
    record: Record,
    measurements: Measurements,
    network: Network,
    module: str,
    job: Mapping[str, Any],
) -> Iterator[Row]:
    """Measure the rows that a record does not have yet, in one launch, and yield each.

    The network is not open yet, as it is needed only if a row is missing; see `Workers` for the others.
    """
    stored = {row["key"] for row in record.rows}
    missing = {key: function for key, function in measurements.items() if key not in stored}
    if not missing:
        return
    with network, Workers(network, module, job, max(1, CORES // network.num_workers)) as workers:
        for key, function in missing.items():
            yield record.measure(key, partial(function, workers, network))


class OneMachine:
    """Workers that share this machine's own network; in the place of a `Network`."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers: Final = num_workers
        self._port: Final = free_port()

    def command(self, worker: int) -> list[str]:
        """See `Network.command`."""
        return []

    def environment(self, worker: int) -> dict[str, str]:
        """See `Network.environment`."""
        return rank_environment(worker, self.num_workers, self.num_workers, "localhost", self._port)


class Workers:
    """Worker processes that serve requests until the block ends, even by an exception.

    Args:
        network: one worker process is started for each of its workers.
        module: of a worker, by name.
        job: of all workers, ready for JSON.
        threads: of each worker.
        environment: further variables for the workers.
    """

    def __init__(
        self,
        network: Network | OneMachine,
        module: str,
        job: Mapping[str, Any],
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._network = network
        self._environment = worker_environment(threads) | dict(environment or {})
        self._command = worker_command(module, [json.dumps(job)])
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[str]] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for worker in range(self._network.num_workers):
            errors = self._open.enter_context(tempfile.TemporaryFile("w+"))
            self._errors.append(errors)
            self._processes.append(
                subprocess.Popen(
                    [*self._network.command(worker), *self._command],
                    env=self._environment | self._network.environment(worker),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if worker == 0 else errors,
                    stderr=errors,
                    bufsize=0,
                )
            )
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # ends the worker's loop over requests
            if failed is not None:  # it may be in the middle of a request
                process.kill()
        until_s = monotonic() + END_TIMEOUT_S
        for process in self._processes:
            try:
                process.wait(max(0.1, until_s - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._open.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid for process in self._processes]

    def ask(self, **request: Any) -> Row:
        """Send a request to all workers and return the answer of rank 0.

        Raises:
            RuntimeError: a worker has ended, or rank 0 does not answer in time.
        """
        line = json.dumps(request).encode() + b"\n"
        try:
            for process in self._processes:
                assert process.stdin is not None
                process.stdin.write(line)
        except BrokenPipeError:
            raise RuntimeError(self._failure()) from None
        return self._answer()

    def _answer(self) -> Row:
        answers = self._processes[0].stdout
        assert answers is not None
        while select.select([answers], [], [], ANSWER_TIMEOUT_S)[0]:
            line = answers.readline().decode()
            if not line:
                raise RuntimeError(self._failure())
            if line.startswith(ANSWER):
                answer: Row = json.loads(line.removeprefix(ANSWER))
                return answer
        raise RuntimeError(f"the workers have not answered for {ANSWER_TIMEOUT_S:.0f} s")

    def _failure(self) -> str:
        """Kill all workers and return the ends of their error outputs."""
        for process in self._processes:
            process.kill()
            process.wait()
        ends = []
        for rank, errors in enumerate(self._errors):
            errors.seek(0)
            ends.append(f"rank {rank}:\n{errors.read()[-3000:]}")
        return "a worker has ended:\n" + "\n".join(ends)
