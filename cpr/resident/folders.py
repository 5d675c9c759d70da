"""Folders of resident memory on the file system: whose they are, who is alive in them, and their removal.

    <root>/cpr-<uid>/<run>/<segment>/      a worker's memory, with its `owner` file locked while it lives
                          /keeper-<process>   an agent for which the run's memory is kept (`Process.tag`)
                          /janitor-<namespace>   locked by the process that removes the run's memory in the
                                              end; one for each PID namespace that has workers of the run

Standard library alone, as the janitor and `cpr clean` use it as well. Nothing here follows a link, and
nothing is touched that another user could have put in place.
"""

import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from cpr.errors import DamagedMemoryError, MemoryVersionError, UnreadableMemoryError
from cpr.processes import is_tag_alive, pid_namespace

ROOT_VARIABLE: Final = "CPR_RESIDENT_ROOT"
DEFAULT_ROOT: Final = "/dev/shm"
OWNER_FILE: Final = "owner"
"""In a segment's folder; its owner holds a lock on it for as long as it lives."""
UNSAVED_FILE: Final = "unsaved"
"""In the folder of a segment whose run cannot save at the moment."""
KEEPER_PREFIX: Final = "keeper-"
JANITOR_PREFIX: Final = "janitor-"
PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600
_TO_GIVE_UP: Final = "to go on without it, from the checkpoint, remove the segment's folder"


class NotPrivateError(PermissionError):
    """A file or folder is a link, or belongs to others, or is open to them."""


def user_folder(root: str | Path | None = None) -> Path:
    """Where this user's resident memory lies.

    Args:
        root: a memory file system; None: `$CPR_RESIDENT_ROOT`, or `/dev/shm`.
    """
    return Path(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT) / f"cpr-{os.getuid()}"


def why_not_private(path: Path, is_folder: bool) -> str | None:
    """Why `path` must not be used, or None: it is ours, no link, and closed to others.

    Raises:
        FileNotFoundError: there is nothing.
    """
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        return f"{path} is a symbolic link"
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(status.st_mode):
        return f"{path} is no {'folder' if is_folder else 'regular file'}"
    if status.st_uid != os.getuid():
        return f"{path} belongs to user {status.st_uid}, not to user {os.getuid()}"
    if status.st_mode & 0o077:
        return f"{path} is open to other users (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def make_private(path: Path) -> None:
    """Make a folder for this user alone, unless it is there.

    Raises:
        NotPrivateError: something else is there.
        OSError: it cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(PRIVATE_FOLDER)
    if reason := why_not_private(path, is_folder=True):
        raise NotPrivateError(f"{reason}; nothing of it was used")


def open_private(path: Path, flags: int) -> int:
    """Open a file of ours, never through a link; with `os.O_CREAT` it is made if need be.

    Raises:
        NotPrivateError: it is a link, or open to others.
        OSError: it cannot be opened.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError:
        with suppress(FileNotFoundError):
            if reason := why_not_private(path, is_folder=False):
                raise NotPrivateError(f"{reason}; nothing of it was used") from None
        raise
    try:
        if reason := why_not_private(path, is_folder=False):
            raise NotPrivateError(f"{reason}; nothing of it was used")
    except BaseException:
        os.close(file)
        raise
    return file


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """While memory of a dead worker is read: tells damage from errors that may pass.

    Raises:
        DamagedMemoryError: the file is missing, or not ours alone.
        UnreadableMemoryError: any other error of the operating system, such as too many open files: nothing
            is known of the memory, which must be kept.
    """
    try:
        yield
    except (FileNotFoundError, NotPrivateError) as error:
        raise DamagedMemoryError(f"{path} cannot be used: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, cause: Exception) -> UnreadableMemoryError:
    """The error to raise for a file that cannot be read for a reason that may pass."""
    return UnreadableMemoryError(
        f"{path} cannot be read now, and is kept: {cause}. What to do: mend the cause (free memory, open "
        f"files, the file system): restarted workers go on with it; {_TO_GIVE_UP}"
    )


def other_version(path: Path, found: object, own: object) -> MemoryVersionError:
    """The error to raise for a file that another version of this program wrote."""
    return MemoryVersionError(
        f"{path} was written by another version of cpr (format {found} instead of {own}), and is kept. "
        f"What to do: restart the workers with that version; {_TO_GIVE_UP}"
    )


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Keep other processes that do the same out of the block; False when the folder is gone."""
    try:
        file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield False
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield is_at(file, folder)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
        os.close(file)


def is_at(file: int, path: Path) -> bool:
    """Whether an open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def try_lock(file: int) -> bool:
    """Lock an open file for as long as it stays open in this process; False: another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock on a file; inside `alone_in`, or it disturbs who wants it."""
    try:
        file = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(file)
    finally:
        os.close(file)


def segment_folders(home: Path) -> list[Path]:
    """The segments in a run's folder, whatever their state."""
    found = []
    with suppress(FileNotFoundError):  # there is no such run
        for entry in home.iterdir():
            with suppress(FileNotFoundError):  # this one goes just now: the others are still there
                if stat.S_ISDIR(entry.lstat().st_mode):
                    found.append(entry)
    return sorted(found)


def unsaved_segments(home: Path) -> list[Path]:
    """Those that hold what its run could not save: they are freed only when a person asks for it."""
    return [folder for folder in segment_folders(home) if (folder / UNSAVED_FILE).exists()]


def forget_unsaved(home: Path) -> None:
    """Have what a run could not save freed as the rest: the run has finished without it."""
    for folder in unsaved_segments(home):
        (folder / UNSAVED_FILE).unlink(missing_ok=True)


def live_segments(home: Path) -> list[Path]:
    """Those whose owner lives; for callers inside `alone_in(home)`."""
    return [folder for folder in segment_folders(home) if is_locked(folder / OWNER_FILE)]


def live_keepers(home: Path) -> list[int]:
    """Process ids of the agents that are alive and for which the run's memory is kept."""
    return [int(tag.split("-")[1]) for tag in _keeper_tags(home) if is_tag_alive(tag)]


def foreign_keepers(home: Path) -> list[str]:
    """Tags of agents in other PID namespaces: nobody here can tell whether they are alive."""
    return [tag for tag in _keeper_tags(home) if is_tag_alive(tag) is None]


def remove_dead_keepers(home: Path) -> None:
    """Remove the files of agents that are dead; inside `alone_in(home)`."""
    for tag in _keeper_tags(home):
        if is_tag_alive(tag) is False:
            (home / f"{KEEPER_PREFIX}{tag}").unlink()


def janitor_file(home: Path) -> Path:
    """Locked by the janitor of this PID namespace while it lives."""
    return home / f"{JANITOR_PREFIX}{pid_namespace()}"


def has_janitor(home: Path) -> bool:
    """Whether a janitor lives, in whatever PID namespace; inside `alone_in(home)`."""
    return any(is_locked(path) for path in home.glob(f"{JANITOR_PREFIX}*"))


def _keeper_tags(home: Path) -> list[str]:
    return sorted(path.name.removeprefix(KEEPER_PREFIX) for path in home.glob(f"{KEEPER_PREFIX}*"))


def remove_home(home: Path) -> None:
    """Remove a run's folder with all in it, and the user's folder if it was the last; inside `alone_in`.

    Raises:
        PermissionError: it is no folder of ours.
        OSError: something cannot be removed.
    """
    if reason := why_not_private(home, is_folder=True):
        raise PermissionError(f"{reason}; nothing of it was removed")
    shutil.rmtree(home)
    with suppress(OSError):
        home.parent.rmdir()


def folder_bytes(folder: Path) -> int:
    """Memory that the files in a folder take, as far as they do not go meanwhile."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            num_bytes += path.lstat().st_blocks * 512
    return num_bytes
