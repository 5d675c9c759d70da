"""Small runs of real processes: a shell in place of torchrun, and workers that sleep."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

from cpr.faults.worker_processes import FoundWorker, find_workers, victim
from cpr.processes import Process

SLEEP = "sleep 600"
WAIT_S = 60.0


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        time.sleep(0.01)


def state_of(process: Process) -> str:
    """State of a process: one letter, see proc(5)."""
    return Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


class FakeRun:
    """Starts shells that start workers, and kills all remaining processes at the end."""

    def __init__(self) -> None:
        self._shells: list[subprocess.Popen] = []
        self._seen: set[Process] = set()

    def agent(self, *ranks: int, command: str = SLEEP, restarts: bool = False, wrapped: bool = False) -> int:
        """A shell with a worker for each rank.

        Args:
            ranks: of the workers.
            command: what each of them runs.
            restarts: whether a dead worker is restarted; for one rank.
            wrapped: whether the returned pid is that of another shell, which starts the agent.
        """
        if restarts:
            script = f"while true; do RANK={ranks[0]} {command}; done"
        else:
            script = " & ".join(f"RANK={rank} {command}" for rank in ranks) + " & wait"
        arguments = ["sh", "-c", script]
        if wrapped:
            arguments = ["sh", "-c", '"$@"; exit', "sh", *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "RANK"}
        shell = subprocess.Popen(arguments, env=environment, stderr=subprocess.DEVNULL)
        self._shells.append(shell)
        root = victim(shell.pid)
        wait_for(lambda: [worker.rank for worker in self.workers(root)] == sorted(ranks))
        return shell.pid

    def workers(self, root: Process | int) -> list[FoundWorker]:
        """`find_workers`, whose result is killed at the end."""
        root = victim(root) if isinstance(root, int) else root
        found = find_workers(root)
        for worker in found:
            self._seen |= {*worker.processes, worker.agent}
        return found

    def end(self) -> None:
        """Kill all remaining processes."""
        for shell in self._shells:
            if shell.poll() is None:
                self.workers(shell.pid)
                shell.kill()
            shell.wait()
        for process in self._seen:
            process.send(SIGKILL)


def python(code: str) -> str:
    """A shell command that runs a program without the time it takes Python to find its packages."""
    quoted = code.replace("'", "'\"'\"'")
    return f"{sys.executable} -I -S -c '{quoted}'"
