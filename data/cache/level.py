"""One level of the cache: a folder of entries with a size limit, shared by the workers of a node.

An entry is written under a temporary name and renamed, so that readers see it atomically. A file holds the
sum of sizes, under a lock; the entries are counted again when the sum reaches the limit.

Eviction removes the least recently used entries, except those that a current worker has used or stored since
it started. Epochs read in a circle, so that pure LRU on data slightly larger than the limit would evict each
row group just before its next use. This way the part that fits stays, and only entries of earlier runs and
other data sets are evicted.
"""

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Final

import pyarrow as pa

from data.cache.entry import is_whole
from data.cache.lock import FileLock

logger = logging.getLogger(__name__)

SUFFIX: Final = ".arrow"
TEMPORARY: Final = ".tmp"
SPARE: Final = 1 / 16
"""Share of the limit that one eviction frees, so that not every new entry counts all of them."""
WITHOUT: Final = "nothing more is stored there, and missing row groups are read from the data set"


class Level:
    """A folder of cached entries.

    Args:
        name: for messages.
        folder: of the entries; created if absent.
        limit_bytes: limit of all entries of all workers together; 0 switches the level off.
    """

    def __init__(self, name: str, folder: Path, limit_bytes: int) -> None:
        self._label, self._folder, self._limit_bytes = f"the {name} cache in {folder}", folder, limit_bytes
        self._opened_s = time.time()
        # inodes and sizes of the entries whose checksums this process has verified
        self._checked: dict[str, tuple[int, int]] = {}
        self._failed, self._full = limit_bytes == 0, False
        if limit_bytes:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                self._give_up("be made", error)

    @property
    def accepts(self) -> bool:
        """Whether the level can probably store a new entry."""
        return not (self._failed or self._full)

    def holds(self, key: str) -> bool:
        """Whether there is an entry, intact or damaged."""
        return (self._folder / f"{key}{SUFFIX}").exists()

    def load(self, key: str) -> pa.Buffer | None:
        """Map an entry into memory; None if absent. A damaged entry is removed."""
        path = self._folder / f"{key}{SUFFIX}"
        try:
            inode = path.stat().st_ino
        except OSError:
            return None
        try:
            with pa.memory_map(str(path)) as file:
                blob = file.read_buffer()
            if self._checked.get(key) != (inode, blob.size) and not is_whole(blob):
                raise OSError("its checksum is wrong")
        except (OSError, pa.ArrowException) as error:
            self._remove_damaged(path, error)
            return None
        self._checked[key] = inode, blob.size
        with contextlib.suppress(OSError):  # evicted meanwhile, or on a read-only disk
            os.utime(path)
        return blob

    def store(self, key: str, blob: pa.Buffer) -> None:
        """Store an entry, after an eviction if needed; never raises for a failing disk."""
        path = self._folder / f"{key}{SUFFIX}"
        try:
            if self.accepts and not path.exists():
                self._store(path, blob)
        except OSError as error:
            self._give_up("be written", error)

    def claim(self, key: str) -> FileLock | None:
        """Claim the fetch of `key`; None if another worker has claimed it, or the folder fails.

        Release the claim with `remove=True`.
        """
        try:
            return FileLock.try_acquire(self._folder / f"{key}.lock")
        except OSError as error:
            self._give_up("be written", error)
            return None

    def _store(self, path: Path, blob: pa.Buffer) -> None:
        temporary = path.with_suffix(f".{os.getpid()}{TEMPORARY}")
        lock = self._reserve(temporary, blob.size)
        if lock is None:
            return
        try:
            with temporary.open("r+b") as file:
                file.write(blob)
            with self._total_lock():  # a concurrent count sees exactly one of the two names
                temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            lock.release()

    def _total_lock(self) -> FileLock:
        return FileLock.acquire(self._folder / "total.lock")

    def _reserve(self, temporary: Path, size: int) -> FileLock | None:
        """Create and lock a file of `size`, which counts against the limit.

        None if there is no room, or another thread of this process is writing the same entry.
        """
        with self._total_lock():
            total = self._read_total()
            if total is None or total + size > self._limit_bytes:
                total = self._make_room(size)
            if total + size > self._limit_bytes:
                self._full = True
                logger.info("%s is full (%d of %d bytes): %s", self._label, total, self._limit_bytes, WITHOUT)
                return None
            lock = FileLock.try_acquire(temporary)
            if lock is None:
                return None
            try:
                os.truncate(temporary, size)
                (self._folder / "total").write_text(str(total + size))
            except OSError:
                lock.release(remove=True)
                raise
            return lock

    def _read_total(self) -> int | None:
        try:
            return int((self._folder / "total").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def _make_room(self, size: int) -> int:
        """Evict what may be evicted until `size` fits, and a little more; the bytes then in use."""
        total, evictable = 0, []
        for path in self._folder.iterdir():
            if path.suffix not in (SUFFIX, TEMPORARY) or _removed_abandoned(path):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another worker found it damaged
            total += status.st_size
            if path.suffix == SUFFIX and status.st_mtime < self._opened_s:
                evictable.append((status.st_mtime, status.st_size, path))
        if total + size <= self._limit_bytes:
            return total
        for _, entry_size, path in sorted(evictable):
            if total + size <= self._limit_bytes * (1 - SPARE):
                break
            path.unlink(missing_ok=True)
            total -= entry_size
        return total

    def _remove_damaged(self, path: Path, error: Exception) -> None:
        logger.warning("the cached file %s is damaged (%s): it is read again from the data set", path, error)
        self._full = False
        try:
            path.unlink(missing_ok=True)
        except OSError as unlink_error:
            self._give_up("be repaired", unlink_error)

    def _give_up(self, what: str, error: OSError) -> None:
        if not self._failed:
            logger.warning("%s cannot %s (%s): %s", self._label, what, error, WITHOUT)
        self._failed = True


def _removed_abandoned(path: Path) -> bool:
    """Remove a temporary file whose writer has died, so that its lock is free."""
    if path.suffix != TEMPORARY:
        return False
    lock = FileLock.try_acquire(path)
    if lock is None:
        return False
    lock.release(remove=True)
    return True
