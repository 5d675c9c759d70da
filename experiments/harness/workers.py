"""Workers behind links of a chosen speed that wait for requests, and how they are told what to do.

A worker is a module that reads its job as JSON from the command line, meets the others, and then does what
lines of JSON on its standard input ask for, until there are none; rank 0 answers each with a line.
"""

import json
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from time import monotonic
from typing import IO, Any, Final, Self

from experiments.harness.launch import worker_environment
from experiments.harness.network import Network
from experiments.harness.record import Row

ANSWER: Final = "answer: "
"""Begins a line of rank 0 that is meant for the launcher."""
MOST_S: Final = 600.0
"""That an answer may take."""
LEAVES_WITHIN_S: Final = 20.0
"""Each worker, or it is killed."""


class Workers:
    """Processes that wait for requests; gone at the end of the block, however it ends.

    Args:
        network: that they meet in.
        module: of a worker, by name.
        job: of all of them, ready for JSON.
        threads: of each.
    """

    def __init__(self, network: Network, module: str, job: Mapping[str, Any], threads: int) -> None:
        self._network, self._threads = network, threads
        self._command = [sys.executable, "-m", module, json.dumps(job)]
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
                    env=worker_environment(self._threads) | self._network.environment(worker),
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
            process.stdin.close()  # which is how they know that they are done
            if failed is not None:  # in the middle of a request, which nobody waits for any more
                process.kill()
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
