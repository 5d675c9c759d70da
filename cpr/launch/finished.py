"""How `cpr run` learns that its run has finished while it was cut off: it asks the checkpoint directory.

The workers of a node that comes back too late never meet: the others are gone, and torchrun would wait for
them for minutes and then fail. So workers tell `cpr run` which directory is theirs, and while it has none, it
has a process look who owned the directory last. Standard library only, but for that process.

    python -m cpr.launch.finished RUN FILE     if the run has finished, writes the step to FILE

RUN is what a worker has written: the checkpoint directory and the folder of the run's memory. What this
node could not save is of no use once the run has finished: it is no longer kept, and the janitor frees it.
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

FOLDER_VARIABLE: Final = "CPR_LAUNCH_FOLDER"
"""Set by `cpr run`: where its workers leave word."""
_RUN_FILE: Final = "run.json"
IDLE_S: Final = 10.0
"""So long `cpr run` is without workers before it looks, and so long it waits before it looks again."""
ANSWER_S: Final = 60.0
"""The longest that it waits for an answer when torchrun has ended."""


def note_run(uri: str, memory: Path) -> None:
    """Tell the `cpr run` above this worker, if there is one, about its run.

    Args:
        uri: the checkpoint directory.
        memory: the folder of the run's resident memory on this machine.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder:
        temporary = Path(folder) / f"run-{os.getpid()}.json"
        with suppress(OSError):  # without it `cpr run` waits for torchrun, as it does for any other program
            temporary.write_text(json.dumps({"uri": uri, "memory": str(memory)}))
            temporary.replace(Path(folder) / _RUN_FILE)


class FinishWatch:
    """Whether a run has finished, asked again and again without waiting for the answer.

    Args:
        folder: where workers leave word.
    """

    def __init__(self, folder: Path) -> None:
        self._run, self._answer = folder / _RUN_FILE, folder / "finished"
        self._asked: Process | None = None
        self._had_workers_s = time.monotonic()

    @property
    def step(self) -> int | None:
        """At which the run finished, as far as it is known; None: not."""
        try:
            return int(self._answer.read_text())
        except (OSError, ValueError):
            return None

    def look(self, has_workers: bool) -> None:
        """Called often; asks when there have been no workers for a while."""
        now_s = time.monotonic()
        if has_workers:
            self._had_workers_s = now_s
        elif now_s >= self._had_workers_s + IDLE_S and not self._is_asking:
            self._had_workers_s = now_s
            self.ask()

    def ask(self) -> None:
        """Have a process look."""
        if self._run.is_file():
            command = [sys.executable, "-m", "cpr.launch.finished", str(self._run), str(self._answer)]
            quiet = subprocess.DEVNULL
            pid = subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet).pid
            self._asked = Process.find(pid)

    def wait(self) -> None:
        """Until the answer is there, or it takes too long."""
        deadline = time.monotonic() + ANSWER_S
        while self._is_asking and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def _is_asking(self) -> bool:
        return self._asked is not None and self._asked.is_alive


def main(run: str, answer: str) -> None:
    """See the module."""
    from cpr.checkpoint.ownership.records import newest_owner  # noqa: PLC0415  # what reads a directory imports pyarrow
    from cpr.checkpoint.storage.base import open_storage  # noqa: PLC0415
    from cpr.resident.folders import forget_unsaved  # noqa: PLC0415

    noted = json.loads(Path(run).read_text())
    owner = newest_owner(open_storage(noted["uri"]))
    if owner is not None and owner.finished is not None:
        forget_unsaved(Path(noted["memory"]))
        temporary = Path(f"{answer}-{os.getpid()}")
        temporary.write_text(str(owner.finished))
        temporary.replace(answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
