"""Lists the shared memory of this user's runs, and removes what dead runs left there."""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cpr.resident.folders import (
    alone_in,
    folder_bytes,
    foreign_keepers,
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
    """The memory of one run."""

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
