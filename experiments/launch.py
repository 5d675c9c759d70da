"""Starting workers under torchrun, as a user would, for experiments that measure whole runs."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]


def torchrun_command(module: str, arguments: Sequence[str], processes: int) -> list[str]:
    """The command line of `torchrun --standalone`, which picks a free port, for this interpreter."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", str(processes), "-m", module, *arguments]


def worker_environment(threads: int) -> dict[str, str]:
    """The environment of workers with `threads` threads each, that find this repository's packages."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}


def torchrun(module: str, arguments: Sequence[str], *, processes: int, threads: int) -> None:
    """Run a module under torchrun to its end.

    Args:
        module: its name, as after `python -m`.
        arguments: its command line.
        processes: workers on this machine.
        threads: threads of each worker.

    Raises:
        RuntimeError: it failed; the message holds the end of its output.
    """
    done = subprocess.run(
        torchrun_command(module, arguments, processes),
        env=worker_environment(threads),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with status {done.returncode}:\n{done.stdout[-4000:]}")
