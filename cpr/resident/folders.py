"""Folders of resident memory on the file system: their owners, live processes in them, and their removal.

    <root>/cpr-<uid>/<run>/<segment>/      a worker's memory; its `owner` file is locked while the worker
    lives
                          /keeper-<process>   an agent for which the run's memory is kept (`Process.tag`)
                          /janitor-<namespace>   locked by the process that removes the run's memory at the
                                              end; one for each PID namespace that has workers of the run

Only the standard library is used, because the janitor and `cpr clean` use this module. Nothing here follows a
link, or touches what another user could have put in place.
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
"""File in a segment's folder; the owner holds a lock on it as long as the owner lives."""
UNSAVED_FILE: Final = "unsaved"
"""File in the folder of a segment that could not be saved; holds the newest step that is saved, or -1."""
KEEPER_PREFIX: Final = "keeper-"
JANITOR_PREFIX: Final = "janitor-"
PRIVATE_FOLDER: Final = 0o700
PRIVATE_FILE: Final = 0o600
_TO_GIVE_UP: Final = "to continue without it, from the checkpoint, remove the segment's folder"


class NotPrivateError(PermissionError):
    """A file or folder is a link, belongs to another user, or is open to others."""


def user_folder(root: str | Path | None = None) -> Path:
    """Folder of this user's resident memory; without a root in `$CPR_RESIDENT_ROOT`, or `/dev/shm`."""
    return Path(root or os.environ.get(ROOT_VARIABLE) or DEFAULT_ROOT) / f"cpr-{os.getuid()}"


def why_not_private(path: Path, is_folder: bool) -> str | None:
    """Why `path` must not be used; None if it is this user's, no link, and closed to others.

    Raises:
        FileNotFoundError: the path does not exist.
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
    """Make a folder for this user alone, unless it exists.

    Raises:
        NotPrivateError: the path exists, but is not such a folder.
        OSError: the folder cannot be made.
    """
    with suppress(FileExistsError):
        path.mkdir(PRIVATE_FOLDER)
    _check_private(path, is_folder=True)


def open_private(path: Path, flags: int) -> int:
    """Open a private file of this user, never through a link; `os.O_CREAT` makes it if it is missing.

    Raises:
        NotPrivateError: the file is a link, or open to others.
        OSError: the file cannot be opened.
    """
    try:
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, PRIVATE_FILE)
    except OSError:
        with suppress(FileNotFoundError):
            _check_private(path, is_folder=False)
        raise
    try:
        _check_private(path, is_folder=False)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_private(path: Path, is_folder: bool) -> None:
    if reason := why_not_private(path, is_folder):
        raise NotPrivateError(f"{reason}; nothing of it was used") from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Tell damage from passing errors while memory of a dead worker is read in the block.

    Raises:
        DamagedMemoryError: the file is missing, or not private.
        UnreadableMemoryError: any other error of the operating system, such as too many open files. The
            memory may be whole, and must be kept.
    """
    try:
        yield
    except (FileNotFoundError, NotPrivateError) as error:
        raise DamagedMemoryError(f"{path} cannot be used: {error}") from error
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, cause: Exception) -> UnreadableMemoryError:
    """Make the error for a file that cannot be read for a reason that may pass."""
    return UnreadableMemoryError(
        f"{path} cannot be read now, and is kept: {cause}. What to do: mend the cause (free memory, open "
        f"files, the file system): restarted workers continue with it; {_TO_GIVE_UP}"
    )


def other_version(path: Path, found: object, own: object) -> MemoryVersionError:
    """Make the error for a file that another version of this program wrote."""
    return MemoryVersionError(
        f"{path} was written by another version of cpr (format {found} instead of {own}), and is kept. "
        f"What to do: restart the workers with that version; {_TO_GIVE_UP}"
    )


@contextmanager
def alone_in(folder: Path) -> Iterator[bool]:
    """Exclude other processes from the same block by a lock on the folder; yields False if it is gone."""
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
    """Whether some process holds the lock on a file; inside `alone_in`, or it disturbs claims."""
    try:
        file = open_private(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        return not try_lock(file)
    finally:
        os.close(file)


def segment_folders(home: Path) -> list[Path]:
    """List the segment folders in a run's folder, whatever their state; none if there is no such run."""
    found = []
    with suppress(FileNotFoundError):  # there is no such run
        for entry in home.iterdir():
            with suppress(FileNotFoundError):  # this entry was just removed: the others are still there
                if stat.S_ISDIR(entry.lstat().st_mode):
                    found.append(entry)
    return sorted(found)


def unsaved_segments(home: Path) -> list[Path]:
    """Segments that the run could not save: they are freed only at a user's request."""
    return [folder for folder in segment_folders(home) if (folder / UNSAVED_FILE).exists()]


def forget_unsaved(home: Path, newest_step: int | None = None) -> None:
    """Allow the janitor to free unsaved memory, because the run has continued without it.

    Args:
        home: the run's folder.
        newest_step: training steps done in the newest save; only memory that was marked while an older save
            was the newest may be freed. None: the run has finished, and all may be.
    """
    for folder in unsaved_segments(home):
        marker = folder / UNSAVED_FILE
        step = marker.read_text()  # empty: the worker was killed before it wrote the step
        if newest_step is None or (step and newest_step > int(step)):
            marker.unlink(missing_ok=True)


def live_segments(home: Path) -> list[Path]:
    """Segments whose owner lives; for callers inside `alone_in(home)`."""
    return [folder for folder in segment_folders(home) if is_locked(folder / OWNER_FILE)]


def live_keepers(home: Path) -> list[int]:
    """Process ids of the live agents for which the run's memory is kept."""
    return [int(tag.split("-")[1]) for tag in _keeper_tags(home) if is_tag_alive(tag)]


def foreign_keepers(home: Path) -> list[str]:
    """Tags of agents in other PID namespaces, where it is unknown whether they are alive."""
    return [tag for tag in _keeper_tags(home) if is_tag_alive(tag) is None]


def remove_dead_keepers(home: Path) -> None:
    """Remove the keeper files of dead agents; inside `alone_in(home)`."""
    for tag in _keeper_tags(home):
        if is_tag_alive(tag) is False:
            (home / f"{KEEPER_PREFIX}{tag}").unlink()


def janitor_file(home: Path) -> Path:
    """File that the janitor of this PID namespace locks while it lives."""
    return home / f"{JANITOR_PREFIX}{pid_namespace()}"


def has_janitor(home: Path) -> bool:
    """Whether a janitor lives, in any PID namespace; inside `alone_in(home)`."""
    return any(is_locked(path) for path in home.glob(f"{JANITOR_PREFIX}*"))


def _keeper_tags(home: Path) -> list[str]:
    return sorted(path.name.removeprefix(KEEPER_PREFIX) for path in home.glob(f"{KEEPER_PREFIX}*"))


def remove_home(home: Path) -> None:
    """Remove a run's folder, and the user's folder if that is empty then; inside `alone_in`.

    Raises:
        PermissionError: the folder is not private.
        OSError: something cannot be removed.
    """
    if reason := why_not_private(home, is_folder=True):
        raise PermissionError(f"{reason}; nothing of it was removed")
    shutil.rmtree(home)
    with suppress(OSError):
        home.parent.rmdir()


def folder_bytes(folder: Path) -> int:
    """Bytes of memory that the files in a folder take; files removed meanwhile do not count."""
    num_bytes = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            num_bytes += path.lstat().st_blocks * 512
    return num_bytes
