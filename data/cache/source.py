"""`CachedSource`: a row group source with a cache, for data sets on remote storage.

This is the multi-level cache of Shi et al., "Towards Scalable Distributed Training of Deep Learning on Public
Cloud Clusters" (MLSys 2021), for decoded row groups. Level 1 is a folder on a memory file system, which all
workers of a node map without a copy, level 2 is a folder on local disk, and behind both is the data set. A
background thread writes fetched row groups to disk, and copies row groups to memory when they are requested
again. Another thread fetches the row groups that the reader will need next.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Final

import pyarrow as pa

from data.cache.ahead import ReadAhead
from data.cache.entry import Encoder, decode
from data.cache.level import Level
from data.cache.lock import FileLock
from data.dataset import Part
from data.loader.background import Background
from data.loader.source import RowGroupSource

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""Format version, part of every key."""
POLL_S: Final = 0.005
"""Interval at which a worker checks for a row group that another worker fetches."""
QUIET_S: Final = 0.1
"""Time that storing waits for the start of the next fetch."""
PATIENCE_S: Final = 30.0
"""Time after which a worker fetches such a row group itself, since the other one may be suspended."""
QUEUED: Final = 4
"""Maximum of row groups that wait for storing. If storing is slower than fetching, others are not cached."""
CLOSE_S: Final = 30.0
"""Time that closing waits for storing them."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Folders and size limits of the cache."""

    folder: Path
    """Folder on local disk, which workers of a node share and later runs reuse."""
    disk_limit_bytes: int
    """Limit of all files in `folder` together; 0 keeps nothing on disk."""
    memory_limit_bytes: int
    """Limit of all files in memory, of all workers of the node together; 0 keeps nothing in memory. Each
    worker additionally holds up to `ahead.AHEAD` row groups for its reader and `QUEUED` for the
    disk."""
    memory_folder: Path = Path("/dev/shm")
    """Memory file system. The last worker that closes its cache empties it."""

    def __post_init__(self) -> None:
        for name in ("disk_limit_bytes", "memory_limit_bytes"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 0:
                raise ValueError(f"{name} must be a whole number of bytes, 0 or more, not {value!r}")


class CachedSource:
    """Gives row groups from the cache, or from `inner` if they are not cached yet.

    A full, read-only or damaged cache costs speed and a warning; only errors of `inner` are raised.

    Args:
        inner: source of row groups that are not cached.
        config: of the cache.
    """

    def __init__(self, inner: RowGroupSource, config: CacheConfig) -> None:
        self._inner = inner
        users, memory_folder = _share_memory(config)
        memory_limit_bytes = config.memory_limit_bytes if users else 0
        self._leave_memory = weakref.finalize(self, _leave_memory, users, memory_folder)
        disk = Level("disk", config.folder, config.disk_limit_bytes)
        self._levels = [Level("memory", memory_folder, memory_limit_bytes), disk]
        self._writer = Background("cache-writer", finish=True)
        self._ahead = ReadAhead()
        self._encoder = Encoder()  # used by the writer thread alone
        self._fetching = threading.Event()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of `inner`."""
        return self._inner.columns

    def expect(self, part: Part, row_group: int) -> None:
        """Start to fetch a row group; see `ReadsAhead.expect`."""
        key = self._key(part, row_group)
        # a cached row group needs no waiting, so that another thread would only compete for the processor
        if not any(level.holds(key) for level in self._levels):
            self._ahead.begin(key, partial(self._read_ahead, part, row_group, key))

    def read(self, part: Part, row_group: int) -> pa.Table:
        """Read one row group; see `RowGroupSource.read`."""
        key = self._key(part, row_group)
        expected = self._ahead.take(key)
        if expected is not None:
            return expected
        give_up_s = time.monotonic() + PATIENCE_S
        while True:
            table = self._load(key)
            if table is not None:
                return table
            claim = self._claim(key)
            if claim is not None:
                return self._fetch(part, row_group, key, claim)
            if not any(level.accepts for level in self._levels) or time.monotonic() > give_up_s:
                return self._inner.read(part, row_group)
            time.sleep(POLL_S)

    def close(self) -> None:
        """Finish all writes; the last worker of the node empties the memory level."""
        self._ahead.close()
        self._writer.close(CLOSE_S)
        self._leave_memory()

    def _key(self, part: Part, row_group: int) -> str:
        """Key of the content: equal for the same file in another data set, different for a changed file."""
        what = [FORMAT, part.sha256, row_group, list(self.columns)]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]

    def _read_ahead(self, part: Part, row_group: int, key: str) -> pa.Table | None:
        """Fetch a row group; None if another worker is fetching it, for which only the reader waits."""
        claim = self._claim(key)
        if claim is not None:
            return self._fetch(part, row_group, key, claim)
        return None if any(level.accepts for level in self._levels) else self._inner.read(part, row_group)

    def _load(self, key: str) -> pa.Table | None:
        for level in self._levels:
            blob = level.load(key)
            if blob is not None:
                above = self._levels[: self._levels.index(level)]
                if any(other.accepts for other in above):
                    self._store_later(partial(_store, above, key, blob))
                return decode(blob)
        return None

    def _store_later(self, task: Callable[[], None]) -> bool:
        """Run a task in the writer thread; returns False if too many wait, or the cache is closed."""
        return self._writer.num_waiting < QUEUED and not self._writer.submit(partial(_run, task)).cancelled()

    def _claim(self, key: str) -> FileLock | None:
        for level in self._levels:
            if level.accepts:
                return level.claim(key)
        return None

    def _fetch(self, part: Part, row_group: int, key: str, claim: FileLock) -> pa.Table:
        """Read from `inner`, and hold the claim until the row group is stored, so that other workers wait."""
        levels, encoder, fetching = self._levels, self._encoder, self._fetching

        def keep() -> None:
            try:
                # the processor is idle during the next fetch, and now it decodes this row group
                fetching.wait(QUIET_S)
                # the disk first, as in the paper; memory gets row groups that are requested again
                _store([level for level in levels if level.accepts][-1:], key, encoder.encode(table))
            finally:
                claim.release(remove=True)

        kept = False
        try:
            table = self._load(key)  # another worker may have stored it just before the claim
            if table is None:
                self._fetching.set()
                table = self._inner.read(part, row_group)
                self._fetching.clear()
                kept = self._store_later(keep)
            return table
        finally:
            if not kept:
                claim.release(remove=True)


def _run(task: Callable[[], None]) -> None:
    try:
        task()
    except Exception:
        logger.exception("a row group could not be cached; it stays on the remote storage")


def _store(levels: Sequence[Level], key: str, blob: pa.Buffer) -> None:
    for level in levels:
        level.store(key, blob)


def _leave_memory(users: FileLock | None, folder: Path) -> None:
    """Release this worker's share; the last worker of the node removes the folder. Runs at exit too."""
    if users is None:
        return
    last = users.try_make_exclusive()
    if last:
        shutil.rmtree(folder, ignore_errors=True)
    users.release(remove=last)


def _share_memory(config: CacheConfig) -> tuple[FileLock | None, Path]:
    """Open the node's folder in memory; returns a lock that marks its use (or None) and its path."""
    name = hashlib.sha256(str(config.folder.resolve()).encode()).hexdigest()[:16]
    folder = config.memory_folder / f"cpr-cache-{os.getuid()}-{name}"
    if config.memory_limit_bytes == 0:
        return None, folder
    try:
        return FileLock.acquire(folder.with_suffix(".users"), shared=True), folder
    except OSError as error:
        logger.warning("no cache in memory (%s): row groups are kept on disk only", error)
        return None, folder
