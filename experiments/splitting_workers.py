"""The workers of `experiments.splitting`, each behind a link of its own, and how they are told what to do."""

import json
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from time import monotonic
from typing import IO, Any, Final, Self

from experiments.launch import worker_environment
from experiments.record import Row
from experiments.splitting_network import Network
from experiments.splitting_workload import Workload

ANSWER: Final = "answer: "
"""Begins a line of rank 0 that is meant for the launcher."""
MOST_S: Final = 600.0
"""That an answer may take."""
LEAVES_WITHIN_S: Final = 20.0
"""Each worker, or it is killed."""


class Workers:
    """A model in processes that wait for requests; gone at the end of the block, however it ends.

    Args:
        network: that they meet in, one worker for each of its links.
        model: one of `splitting_workload.MODELS`.
        workload: see there.
        threads: of each.
    """

    def __init__(self, network: Network, model: str, workload: Workload, threads: int) -> None:
        self._network, self._threads = network, threads
        self._job = json.dumps({"model": model, "workload": asdict(workload)})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[IO[str]] = []
        self._open = ExitStack()

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "experiments.splitting_worker", self._job]
        for worker in range(self._network.num_workers):
            errors = self._open.enter_context(tempfile.TemporaryFile("w+"))
            self._errors.append(errors)
            self._processes.append(
                subprocess.Popen(
                    [*self._network.command(worker), *command],
                    env=worker_environment(self._threads) | self._network.environment(worker),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if worker == 0 else errors,
                    stderr=errors,
                    bufsize=0,
                )
            )
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()  # which is how they know that they are done
        until_s = monotonic() + LEAVES_WITHIN_S
        for process in self._processes:
            try:
                process.wait(max(0.1, until_s - monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._open.close()

    def ask(self, **request: Any) -> Row:
        """Let all of them do something together; what rank 0 answers.

        Raises:
            RuntimeError: one of them has ended, or none answers.
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
        told = self._processes[0].stdout
        assert told is not None
        while select.select([told], [], [], MOST_S)[0]:
            line = told.readline().decode()
            if not line:
                raise RuntimeError(self._failure())
            if line.startswith(ANSWER):
                answer: Row = json.loads(line.removeprefix(ANSWER))
                return answer
        raise RuntimeError(f"the workers have not answered for {MOST_S:.0f} s")

    def _failure(self) -> str:
        """What the workers said last, those first that have failed by themselves."""
        for process in self._processes:
            process.kill()
            process.wait()
        said = []
        for rank, errors in enumerate(self._errors):
            errors.seek(0)
            said.append(f"rank {rank}:\n{errors.read()[-3000:]}")
        return "a worker has ended:\n" + "\n".join(said)
