"""Lists the shared memory of this user's runs, and removes what dead runs left there.

`note_run` notes which run some memory belongs to. A command checks whether that run has continued without
memory that a node could not save:

    python -m cpr.resident.cleanup RUN [FILE]     if the run has finished, writes the step to FILE

RUN is the file of `note_run`. Memory that a node could not save is useless once the run has finished, or has
saved a later state without it: its mark is removed, and the janitor frees it. Standard library only, except
where storage is read.
"""

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpr.resident.folders import (
    PRIVATE_FILE,
    alone_in,
    folder_bytes,
    foreign_keepers,
    forget_unsaved,
    has_janitor,
    live_keepers,
    live_segments,
    remove_home,
    segment_folders,
    unsaved_segments,
    user_folder,
    why_not_private,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Occupied:
    """Describes the memory that one run occupies on this machine, and whether it may be freed."""

    folder: Path
    num_bytes: int
    num_segments: int
    in_use_by: str
    """Description of the process that needs the memory; empty: none is known."""
    doubt: str
    """Why the memory may be needed all the same. Such memory is freed only on request."""
    is_unsaved: bool
    """Whether the run could not save its content. Such memory is freed only on a request of its own."""


def occupied(root: str | Path | None = None) -> list[Occupied]:
    """List this user's runs with memory on this machine.

    Raises:
        PermissionError: the user's folder belongs to another user, or is open to others.
    """
    found = map(_occupied, _homes(user_folder(root)))
    return [each for each in found if each is not None]


def free(home: Path, in_doubt: bool = False, unsaved: bool = False) -> bool:
    """Remove a run's memory; returns False, and does nothing, if a process needs the memory by now.

    Only on a user's request, also memory that may be needed (`in_doubt`), or that the run could not save.

    Raises:
        OSError: the memory cannot be removed.
    """
    with alone_in(home) as there:
        if there and (_users(home) or (_doubt(home) and not in_doubt)):
            return False
        if there and unsaved_segments(home) and not unsaved:
            return False
        if there:
            remove_home(home)
    return True


def free_leftovers(root: Path) -> Iterator[tuple[Path, int]]:
    """Free the memory of this user's runs that are over, where no janitor has done so.

    A run is over if no worker is alive, and no agent that would restart workers. A failure to remove memory
    is logged.

    Yields:
        Folder and bytes of each run that was freed.
    """
    try:
        for home in _homes(user_folder(root)):
            num_bytes = folder_bytes(home)
            if home.is_dir() and free(home):
                yield home, num_bytes
    except OSError as error:
        logger.warning("shared memory that earlier runs left cannot be freed: %s", error)


def _homes(user: Path) -> Iterator[Path]:
    try:
        reason = why_not_private(user, is_folder=True)
    except FileNotFoundError:
        return
    if reason:
        raise PermissionError(f"{reason}; nothing in it was touched")
    for home in sorted(user.iterdir()):
        with suppress(FileNotFoundError):  # a run that ends meanwhile
            if why_not_private(home, is_folder=True) is None:
                yield home


def _occupied(home: Path) -> Occupied | None:
    """Describe the memory of a run; None: the run has ended meanwhile."""
    with alone_in(home) as there:
        if not there:
            return None
        return Occupied(
            folder=home,
            num_bytes=folder_bytes(home),
            num_segments=len(segment_folders(home)),
            in_use_by=_users(home),
            doubt=_doubt(home),
            is_unsaved=bool(unsaved_segments(home)),
        )


def _users(home: Path) -> str:
    """Describe the process that needs the memory; inside `alone_in(home)`."""
    if live := live_segments(home):
        return f"{len(live)} live worker{'s' if len(live) > 1 else ''}"
    if keepers := live_keepers(home):
        return f"process {keepers[0]}, which may restart its workers"
    if foreign_keepers(home) and has_janitor(home):
        return "a run in another PID namespace (container)"
    return ""


def _doubt(home: Path) -> str:
    """Why the memory may be needed though no process is known to need it; inside `alone_in(home)`."""
    if tags := foreign_keepers(home):
        return f"unless process {tags[0].split('-')[-2:][0]} of another PID namespace (container) still runs"
    return ""


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
    """Let memory be freed that the run noted in file `run` no longer needs.

    If the run has finished, its last step is written to file `answer`.
    """
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
