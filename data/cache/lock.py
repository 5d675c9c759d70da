"""File locks between processes, which end with their process: `flock` on a file that is removed after use."""

import fcntl
import os
from pathlib import Path


class FileLock:
    """A held lock; it ends when it is released or dropped, or when its process ends in any way."""

    def __init__(self, path: Path, fd: int) -> None:
        self._path, self._fd = path, fd

    @classmethod
    def acquire(cls, path: Path, *, shared: bool = False) -> "FileLock":
        """Wait for the exclusive or a shared lock."""
        lock = cls._lock(path, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        assert lock is not None
        return lock

    @classmethod
    def try_acquire(cls, path: Path) -> "FileLock | None":
        """Take the exclusive lock; None if the lock is held."""
        return cls._lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def try_make_exclusive(self) -> bool:
        """Turn a shared lock into the exclusive one, if no other process shares it."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def release(self, *, remove: bool = False) -> None:
        """Release the lock; with `remove` (exclusive locks only) also delete its file."""
        if self._fd < 0:
            return
        if remove:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> "FileLock":
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()

    @classmethod
    def _lock(cls, path: Path, how: int) -> "FileLock | None":
        while True:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            lock = cls(path, fd)
            try:
                fcntl.flock(fd, how)
            except BlockingIOError:
                return None
            # The holder before may have removed the file, in which case this lock guards nothing.
            if _is_still(fd, path):
                return lock
            lock.release()


def _is_still(fd: int, path: Path) -> bool:
    try:
        return path.stat().st_ino == os.fstat(fd).st_ino
    except FileNotFoundError:
        return False
