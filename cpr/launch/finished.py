"""Detection by `cpr run` that nothing is left to do for its node.

A worker that ends because restarts cannot help leaves a note for `cpr run`, which then stops torchrun.

A run may also finish while this node is cut off. The workers of a node that returns too late never complete
the rendezvous: the others are gone, and torchrun would wait for minutes and then fail. So workers tell `cpr
run` their checkpoint directory, and while it has no workers, it runs a process that reads the last owner of
the directory (`cpr.resident.cleanup`).
"""

import os
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from cpr.processes import Process, is_tag_alive
from cpr.resident.cleanup import RUN_FILE, check_command, write_private

FOLDER_VARIABLE: Final = "CPR_LAUNCH_FOLDER"
"""Environment variable of the folder through which workers talk to their `cpr run`."""
_STOPPED_FILE: Final = "stopped"
IDLE_S: Final = 10.0
"""Seconds without workers before each check."""
ANSWER_S: Final = 60.0
"""Longest wait for the answer of a check when torchrun has ended."""


def note_stopped() -> None:
    """Tell the `cpr run` above this worker, if any, to stop when this worker ends: restarts cannot help."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        with suppress(OSError):  # then restarts tell the same, until they are used up
            write_private(Path(folder) / _STOPPED_FILE, Process.this().tag)


class FinishWatch:
    """Asynchronous checks whether a run has finished, or has stopped for good.

    Args:
        folder: through which workers talk to `cpr run`.
    """

    def __init__(self, folder: Path) -> None:
        self._run, self._answer = folder / RUN_FILE, folder / "finished"
        self._stopped = folder / _STOPPED_FILE
        self._checker: Process | None = None
        self._had_workers_s = time.monotonic()

    @property
    def step(self) -> int | None:
        """Step at which the run finished; None if no check has found it finished."""
        try:
            return int(self._answer.read_text())
        except (OSError, ValueError):
            return None

    @property
    def has_stopped(self) -> bool:
        """Whether a worker has ended, with its message, because restarts cannot help."""
        try:
            return not is_tag_alive(self._stopped.read_text())
        except OSError:
            return False

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
