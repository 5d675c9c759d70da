"""Starts workers under torchrun, as a user would, and reads what they measured."""

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

ROOT: Final = Path(__file__).parents[2]


def torchrun_command(module: str, arguments: Sequence[str], processes: int, restarts: int = 0) -> list[str]:
    """The command line of `torchrun --standalone`, which picks a free port, for this interpreter.

    Args:
        module: its name, as after `python -m`.
        arguments: its command line.
        processes: workers on this machine.
        restarts: how often torchrun restarts all workers after one has failed.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    workers = ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    return [*launcher, *workers, "-m", module, *arguments]


def worker_command(module: str, arguments: Sequence[str]) -> list[str]:
    """The command line of a worker without torchrun, for this interpreter; see `torchrun_command`."""
    return [sys.executable, "-m", module, *arguments]


def worker_environment(threads: int) -> dict[str, str]:
    """Environment variables for workers with `threads` threads each that import from this repository."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def free_port() -> int:
    """Return a free TCP port of this machine."""
    with socket.create_server(("localhost", 0)) as free:
        port: int = free.getsockname()[1]
        return port


@dataclass(frozen=True)
class Launch:
    """A launcher that was started, and the output of it and its workers."""

    process: "subprocess.Popen[bytes]"
    output: IO[str]

    def check_ended_well(self, timeout_s: float | None = None) -> None:
        """Wait until the launcher ends; None: as long as it takes.

        Raises:
            RuntimeError: it failed, or took longer; the message holds the end of its output.
        """
        try:
            status = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise self.failure(f"took longer than {timeout_s:.0f} s") from None
        if status:
            raise self.failure(f"ended with status {status}")

    def failure(self, what: str) -> RuntimeError:
        """An error that says what happened to the run, with the end of its output."""
        self.output.seek(0)
        return RuntimeError(f"a run {what}:\n{self.output.read()[-4000:]}")


@contextmanager
def running(
    command: Sequence[str], *, threads: int, environment: Mapping[str, str] | None = None
) -> Iterator[Launch]:
    """Run a launcher with its workers, and end all of them when the block ends, even by an exception.

    Args:
        command: from `torchrun_command`.
        threads: threads of each worker.
        environment: variables for them in addition to those of this process.
    """
    with tempfile.TemporaryFile("w+") as output:
        environment = {**worker_environment(threads), **(environment or {})}
        launcher = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            yield Launch(launcher, output)
        finally:
            launcher.terminate()  # not kill, so that it ends its workers too
            launcher.wait()


def torchrun(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    threads: int,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> None:
    """Run a module under torchrun to its end.

    Args:
        module: its name, as after `python -m`.
        arguments: its command line.
        processes: workers on this machine.
        threads: threads of each worker.
        environment: variables for the workers in addition to those of this process.
        timeout_s: see `Launch.check_ended_well`.

    Raises:
        RuntimeError: the launcher failed or took too long; the message holds the end of its output.
    """
    command = torchrun_command(module, arguments, processes)
    with running(command, threads=threads, environment=environment) as launch:
        launch.check_ended_well(timeout_s)


def measure_under_torchrun(
    module: str,
    job: Mapping[str, Any],
    *,
    processes: int,
    threads: int,
    environment: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> dict[str, Any]:
    """Run workers under torchrun and return what rank 0 measured.

    Args:
        module: worker, by name; writes its measurement as JSON to the job's `out`.
        job: ready for JSON; `out` and `scratch`, an empty folder for the time of the run, are added.
        processes: see `torchrun`.
        threads: see `torchrun`.
        environment: see `torchrun`.
        timeout_s: see `torchrun`.

    Raises:
        RuntimeError: the launcher failed or took too long; the message holds the end of its output.
    """
    with tempfile.TemporaryDirectory(prefix="experiment-") as scratch:
        out = Path(scratch) / "measured.json"
        request = json.dumps({**job, "scratch": scratch, "out": str(out)})
        limits: dict[str, Any] = {"processes": processes, "threads": threads, "timeout_s": timeout_s}
        torchrun(module, [request], environment=environment, **limits)
        measured: dict[str, Any] = json.loads(out.read_text())
        return measured
