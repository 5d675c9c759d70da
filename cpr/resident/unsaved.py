"""Memory that a run could not save: which run it belongs to, and whether the run has continued without it.

    python -m cpr.resident.unsaved RUN [FILE]     if the run has finished, writes the step to FILE

RUN is the file of `note_run`. Memory that a node could not save is useless once the run has finished, or has
saved a later state without it: its mark is removed, and the janitor frees it. Standard library only, except
where storage is read.
"""

import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from cpr.resident.cleanup import occupied
from cpr.resident.folders import PRIVATE_FILE, forget_unsaved, unsaved_segments

RUN_FILE: Final = "run.json"
"""File in the folder of a run's memory: the checkpoint directory and the session of the run."""


def note_run(uri: str, session_id: str, memory: Path, *folders: Path) -> None:
    """Write down in folders which run some memory belongs to.

    Args:
        uri: the checkpoint directory.
        session_id: of the run.
        memory: the folder of the run's resident memory on this machine.
        folders: for the janitor, and for the `cpr run` above this worker.
    """
    run = json.dumps({"uri": _absolute(uri), "session_id": session_id, "memory": str(memory)})
    for folder in folders:
        with suppress(OSError):  # then `cpr run` waits for torchrun, and unsaved memory for a user
            write_private(folder / RUN_FILE, run)


def check_command(run: Path, *answer: Path) -> list[str]:
    """The command that checks whether a run has continued without its memory; see the module docstring."""
    return [sys.executable, "-m", __name__, str(run), *map(str, answer)]


def find_unsaved(uri: str, session_id: str, newest_step: int, root: Path | None = None) -> Path | None:
    """Find memory on this machine that a session could not save, and that no save has made useless.

    Args:
        uri: the session's checkpoint directory.
        session_id: of the session that owned the directory last.
        newest_step: training steps done in the newest save; -1: nothing is saved.
        root: a memory file system; None: the default one.

    Returns:
        Folder of the session's memory; None if there is none, or processes use it.
    """
    for run in occupied(root):
        if not run.is_unsaved or run.in_use_by:
            continue
        with suppress(OSError, ValueError, KeyError):  # an older version has written no such file
            noted = json.loads((run.folder / RUN_FILE).read_text())
            if (noted["uri"], noted["session_id"]) == (_absolute(uri), session_id):
                forget_unsaved(run.folder, newest_step)
                if unsaved_segments(run.folder):
                    return run.folder
    return None


def write_private(path: Path, text: str) -> None:
    """Write a small file of this user alone, atomically."""
    temporary = path.with_name(f"{path.name}-{os.getpid()}")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE), "w") as file:
        file.write(text)
    temporary.replace(path)


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
            write_private(Path(answer), str(owner.finished))
    elif owner is not None and owner.session == noted["session_id"]:
        states, _ = find_states(storage)
        if states:
            forget_unsaved(Path(noted["memory"]), states[0].step)


def _absolute(uri: str) -> str:
    """The same directory for processes that work elsewhere, such as the janitor."""
    return uri if "://" in uri else str(Path(uri).absolute())


if __name__ == "__main__":
    main(*sys.argv[1:])
