"""Detection by `cpr run` that its run has finished while this node was cut off.

The workers of a node that returns too late never complete the rendezvous: the others are gone, and torchrun
would wait for minutes and then fail. So workers tell `cpr run` their checkpoint directory, and while it has
no workers, it runs a process that reads the last owner of the directory. Standard library only, but for that:

    python -m cpr.launch.finished RUN [FILE]     if the run has finished, writes the step to FILE

RUN is the file of `note_run`. Memory that this node could not save is useless once the run has finished, or
has saved a later state without it: its mark is removed, and the janitor, which asks too, frees it.
"""

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from cpr.processes import Process
from cpr.resident.folders import PRIVATE_FILE, RUN_FILE, forget_unsaved

FOLDER_VARIABLE: Final = "CPR_LAUNCH_FOLDER"
"""Environment variable of the folder through which workers talk to their `cpr run`."""
IDLE_S: Final = 10.0
"""Seconds without workers before each check."""
ANSWER_S: Final = 60.0
"""Longest wait for the answer of a check when torchrun has ended."""


def note_run(uri: str, session_id: str, memory: Path) -> None:
    """Tell the `cpr run` of this worker, if there is one, and the janitor of its memory about the run.

    Args:
        uri: the checkpoint directory.
        session_id: of the run.
        memory: the folder of the run's resident memory on this machine.
    """
    directory = uri if "://" in uri else str(Path(uri).absolute())  # the janitor works elsewhere
    run = json.dumps({"uri": directory, "session_id": session_id, "memory": str(memory)})
    for folder in filter(None, (str(memory), os.environ.get(FOLDER_VARIABLE))):
        with suppress(OSError):  # then `cpr run` waits for torchrun, and unsaved memory for a user
            _write(Path(folder) / RUN_FILE, run)


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
            command = [sys.executable, "-m", "cpr.launch.finished", str(self._run), str(self._answer)]
            quiet = subprocess.DEVNULL
            pid = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet).pid
            self._checker = Process.find(pid)

    @property
    def _is_checking(self) -> bool:
        return self._checker is not None and self._checker.is_alive


def main(run: str, answer: str | None = None) -> None:
    """See the module docstring."""
    # imported here, as these import pyarrow
    from cpr.checkpoint.catalog.chain import find_states  # noqa: PLC0415
    from cpr.checkpoint.ownership.records import newest_owner  # noqa: PLC0415
    from cpr.checkpoint.storage.base import open_storage  # noqa: PLC0415

    noted = json.loads(Path(run).read_text())
    storage = open_storage(noted["uri"])
    owner = newest_owner(storage)
    if owner is not None and owner.finished is not None:
        forget_unsaved(Path(noted["memory"]))
        if answer is not None:
            _write(Path(answer), str(owner.finished))
    elif owner is not None and owner.session == noted["session_id"]:
        states, _ = find_states(storage)
        if states:
            forget_unsaved(Path(noted["memory"]), states[0].step)


def _write(path: Path, text: str) -> None:
    """Write a small file atomically."""
    temporary = path.with_name(f"{path.name}-{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "w") as file:
        file.write(text)
    temporary.replace(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
