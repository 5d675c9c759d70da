"""Starting workers under torchrun, as a user would, for experiments that measure whole runs."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

ROOT: Final = Path(__file__).parents[2]


def torchrun_command(module: str, arguments: Sequence[str], processes: int, restarts: int = 0) -> list[str]:
    """The command line of `torchrun --standalone`, which picks a free port, for this interpreter.

    Args:
        module: its name, as after `python -m`.
        arguments: its command line.
        processes: workers on this machine.
        restarts: how often torchrun starts all of them again after one has failed.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    workers = ["--nproc-per-node", str(processes), "--max-restarts", str(restarts)]
    return [*launcher, *workers, "-m", module, *arguments]


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of workers with `threads` threads each, that find this repository's packages."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


@contextmanager
def running(
    command: Sequence[str],
    *,
    threads: int,
    output: IO[str],
    environment: Mapping[str, str] | None = None,
) -> Iterator["subprocess.Popen[bytes]"]:
    """A launcher and its workers, which are gone at the end of the block, however it ends.

    Args:
        command: from `torchrun_command`.
        threads: threads of each worker.
        output: where all of them write.
        environment: variables for them besides those of this process.
    """
    launcher = subprocess.Popen(
        command,
        env={**worker_environment(threads), **(environment or {})},
        stdout=output,
        stderr=subprocess.STDOUT,
    )
    try:
        yield launcher
    finally:
        launcher.terminate()  # not kill: it takes its workers along
        launcher.wait()


def check_ended_well(launcher: "subprocess.Popen[bytes]", output: IO[str]) -> None:
    """Wait for the launcher's end.

    Raises:
        RuntimeError: it failed; the message holds the end of its output.
    """
    if launcher.wait():
        output.seek(0)
        raise RuntimeError(f"a run ended with status {launcher.returncode}:\n{output.read()[-4000:]}")


def torchrun(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    threads: int,
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Run a module under torchrun to its end.

    Args:
        module: its name, as after `python -m`.
        arguments: its command line.
        processes: workers on this machine.
        threads: threads of each worker.
        restarts: how often torchrun starts all of them again after one has failed.
        environment: variables for them besides those of this process.

    Raises:
        RuntimeError: it failed; the message holds the end of its output.
    """
    command = torchrun_command(module, arguments, processes, restarts)
    with (
        tempfile.TemporaryFile("w+") as output,
        running(command, threads=threads, output=output, environment=environment) as launcher,
    ):
        check_ended_well(launcher, output)
