"""`CachedSource`: a row group source that remembers, for data that lives on remote storage.

The multi-level cache of Shi et al., "Towards Scalable Distributed Training of Deep Learning on
Public Cloud Clusters" (MLSys 2021), for decoded row groups. Level 1 is a folder on a memory file
system that all workers of a node map without a copy, level 2 a folder on local disk, and behind both
is the data set itself. A background thread writes through to disk what is fetched, and brings into
memory what is asked for again; another one fetches the row groups that the reader expects to need
next, so that the storage is never idle while a row group is worked on.
"""

import hashlib
import json
import logging
import os
import shutil
import threading
import time
import weakref
from collections.abc import Sequence
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
from data.cache.writer import BackgroundWriter
from data.dataset import Part
from data.loader.source import RowGroupSource

logger = logging.getLogger(__name__)

FORMAT: Final = 1
"""Part of every key: entries of another format are never found."""
POLL_S: Final = 0.005
"""How often a worker looks whether the row group that another one fetches has arrived."""
QUIET_S: Final = 0.1
"""How long storing waits for the next fetch to begin."""
PATIENCE_S: Final = 30.0
"""How long it looks before it fetches the row group itself: a worker may be stopped, not dead."""


@dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Where decoded row groups are kept, and how much of them."""

    folder: Path
    """On local disk. Workers of a node that name the same folder share the cache; it stays for later runs."""
    disk_limit_bytes: int
    """All files in `folder` together; 0 keeps nothing on disk."""
    memory_limit_bytes: int
    """All files in memory together, of all workers of the node; 0 keeps nothing in memory. Besides, a worker
    holds the few row groups that are on their way: `ahead.AHEAD` to its reader, `writer.QUEUED` to disk."""
    memory_folder: Path = Path("/dev/shm")
    """A memory file system. The last worker to close its cache removes what is in it."""

    def __post_init__(self) -> None:
        for name in ("disk_limit_bytes", "memory_limit_bytes"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 0:
                raise ValueError(f"{name} must be a whole number of bytes, 0 or more, not {value!r}")


class CachedSource:
    """Row groups from the cache, or else from `inner`, through the cache.

    Never fails where `inner` would not: a full, read-only or damaged cache costs speed and a warning.

    Args:
        inner: where row groups come from.
        config: where they are kept.
    """

    def __init__(self, inner: RowGroupSource, config: CacheConfig) -> None:
        self._inner = inner
        users, memory_folder = _share_memory(config)
        memory_limit_bytes = config.memory_limit_bytes if users else 0
        self._leave_memory = weakref.finalize(self, _leave_memory, users, memory_folder)
        disk = Level("disk", config.folder, config.disk_limit_bytes)
        self._levels = [Level("memory", memory_folder, memory_limit_bytes), disk]
        self._writer = BackgroundWriter()
        self._ahead = ReadAhead()
        self._encoder = Encoder()  # used by the writer's thread only
        self._fetching = threading.Event()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of `inner`."""
        return self._inner.columns

    def expect(self, part: Part, row_group: int) -> None:
        """Begin to fetch a row group, as `ReadsAhead.expect` says."""
        key = self._key(part, row_group)
        # What is here already takes no waiting to read: another thread would only compete for the processor.
        if not any(level.holds(key) for level in self._levels):
            self._ahead.begin(key, partial(self._read_ahead, part, row_group, key))

    def read(self, part: Part, row_group: int) -> pa.Table:
        """One row group, as `RowGroupSource.read` says."""
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
        """Finish what is being written; the last worker of the node empties the memory level."""
        self._ahead.close()
        self._writer.close()
        self._leave_memory()

    def _key(self, part: Part, row_group: int) -> str:
        """Names the content: the same file in another folder or data set is found, a changed one is not."""
        what = [FORMAT, part.sha256, row_group, list(self.columns)]
        return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]

    def _read_ahead(self, part: Part, row_group: int, key: str) -> pa.Table | None:
        """The row group, or None if another worker is fetching it: then only the reader itself waits."""
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
                    self._writer.put(partial(_store, above, key, blob))
                return decode(blob)
        return None

    def _claim(self, key: str) -> FileLock | None:
        for level in self._levels:
            if level.accepts:
                return level.claim(key)
        return None

    def _fetch(self, part: Part, row_group: int, key: str, claim: FileLock) -> pa.Table:
        """Read from `inner`; the claim is kept until the row group is stored, so that others wait for it."""
        levels, encoder, fetching = self._levels, self._encoder, self._fetching

        def keep() -> None:
            try:
                # While the next row group is on its way the processor is idle; now it is decoding this one.
                fetching.wait(QUIET_S)
                # The disk first, as in the paper: memory is filled when a row group is asked for again.
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
                kept = self._writer.put(keep)
            return table
        finally:
            if not kept:
                claim.release(remove=True)


def _store(levels: Sequence[Level], key: str, blob: pa.Buffer) -> None:
    for level in levels:
        level.store(key, blob)


def _leave_memory(users: FileLock | None, folder: Path) -> None:
    """Give up our share; the last one of the node removes the folder. Also when dropped, and at exit."""
    if users is None:
        return
    last = users.try_make_exclusive()
    if last:
        shutil.rmtree(folder, ignore_errors=True)
    users.release(remove=last)


def _share_memory(config: CacheConfig) -> tuple[FileLock | None, Path]:
    """The node's folder in memory, and a lock that says that we use it; None if there is no such memory."""
    name = hashlib.sha256(str(config.folder.resolve()).encode()).hexdigest()[:16]
    folder = config.memory_folder / f"cpr-cache-{os.getuid()}-{name}"
    if config.memory_limit_bytes == 0:
        return None, folder
    try:
        return FileLock.share(folder.with_suffix(".users")), folder
    except OSError as error:
        logger.warning("no cache in memory (%s): row groups are kept on disk only", error)
        return None, folder
