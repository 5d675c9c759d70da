"""Detection by `cpr run` that its run has finished while this node was cut off.

The workers of a node that returns too late never complete the rendezvous: the others are gone, and torchrun
would wait for minutes and then fail. So workers tell `cpr run` their checkpoint directory, and while it has
no workers, it runs a process that reads the last owner of the directory (`cpr.resident.cleanup`).
"""

import subprocess
import time
from pathlib import Path
from typing import Final

from cpr.processes import Process
from cpr.resident.cleanup import RUN_FILE, check_command

FOLDER_VARIABLE: Final = "CPR_LAUNCH_FOLDER"
"""Environment variable of the folder through which workers talk to their `cpr run`."""
IDLE_S: Final = 10.0
"""Seconds without workers before each check."""
ANSWER_S: Final = 60.0
"""Longest wait for the answer of a check when torchrun has ended."""


class FinishWatch:
    """Asynchronous checks whether a run has finished.

    Args:
        folder: through which workers talk to `cpr run`.
    """

    def __init__(self, folder: Path) -> None:
        self._run, self._answer = folder / RUN_FILE, folder / "finished"
        self._checker: Process | None = None
        self._had_workers_s = time.monotonic()

    @property
    def step(self) -> int | None:
        """Step at which the run finished; None if no check has found it finished."""
        try:
            return int(self._answer.read_text())
        except (OSError, ValueError):
            return None

    def look(self, has_workers: bool) -> None:
        """Start a check if there have been no workers for `IDLE_S`; call it often."""
        now_s = time.monotonic()
        if has_workers:
            self._had_workers_s = now_s
        elif now_s >= self._had_workers_s + IDLE_S and not self._is_checking:
            self._had_workers_s = now_s
            self._check()

    def wait_for_answer(self) -> int | None:
        """Check now and wait for the answer, `ANSWER_S` at most; see `step`."""
        self._check()
        deadline = time.monotonic() + ANSWER_S
        while self._is_checking and time.monotonic() < deadline:
            time.sleep(0.05)
        return self.step

    def _check(self) -> None:
        if self._run.is_file():
            command, quiet = check_command(self._run, self._answer), subprocess.DEVNULL
            pid = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet).pid
            self._checker = Process.find(pid)

    @property
    def _is_checking(self) -> bool:
        return self._checker is not None and self._checker.is_alive
