"""The order in which chunks are read and laid: as parallel as it can be with old rows never over new ones.

Chunks of one table in one save hold different rows or columns, so they may be laid in any order; those of the
next save wait until all of them are. They wait with their bytes read and verified, so that many small row
saves on a store far away do not cost one round trip each.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Final

import torch

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.format.manifest import ChunkEntry, RowFileEntry
from cpr.checkpoint.format.row_file import read_chunk
from cpr.checkpoint.load.scatter import Target
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError

LARGE_CHUNK_BYTES: Final = 64 * 2**20
"""Many times what this program writes; memory for such a chunk is taken only if its file is that large."""


@dataclass(frozen=True)
class LoadStats:
    """What a load cost."""

    bytes_read: int
    """Of chunks; each is read once."""
    seconds: float
    buffer_bytes: int
    """Host memory for chunks: a buffer a thread, as large as the largest chunk read. What int8 and int4 rows
    are decoded to comes on top."""


class _Stage:
    """The chunks of one table in one save."""

    def __init__(self, previous: "_Stage | None") -> None:
        self._previous = previous
        self._open = 0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def add(self) -> None:
        """One chunk more; all are added before the first is read."""
        self._open += 1

    def await_turn(self) -> None:
        """Wait until the save before is laid."""
        if self._previous is not None:
            self._previous._over.wait()

    def leave(self) -> None:
        """One chunk is laid, or has failed, which fails the load."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._over.set()


@dataclass(frozen=True, eq=False)
class Read:
    """A chunk that is to be read, and where its rows go."""

    folder: str
    entry: RowFileEntry
    chunk: ChunkEntry
    targets: Sequence[Target]
    stage: _Stage


def plan_reads(state: State, targets: Sequence[Target]) -> list[Read]:
    """All chunks with wanted rows and columns, each once, oldest save first."""
    reads: list[Read] = []
    newest: dict[str, _Stage] = {}
    for save in state.saves:
        stages = {target.shard.table_fqn: _Stage(newest.get(target.shard.table_fqn)) for target in targets}
        for entry in save.rows:
            holders = [target for target in targets if target.extent.overlap(entry.extent)]
            for chunk in entry.chunks:
                wanting = [target for target in holders if target.wants(chunk.first_row, chunk.last_row)]
                if wanting:
                    stage = newest[entry.table_fqn] = stages[entry.table_fqn]
                    stage.add()
                    reads.append(Read(save.folder, entry, chunk, wanting, stage))
    return reads


def run_reads(
    storage: Storage, reads: Sequence[Read], num_threads: int, progress: Callable[[int], None] | None
) -> LoadStats:
    """Read, verify and lay chunks; the first error ends it.

    Args:
        storage: the checkpoint directory.
        reads: as planned, in that order: a thread that waits for chunks of an older save relies on it that
            other threads have taken them before.
        num_threads: at a time.
        progress: called in this thread with the bytes of each chunk that is done.
    """
    began = time.perf_counter()
    for read in reads:
        _check_large(storage, read)
    largest = max((read.chunk.length for read in reads), default=0)
    pinned = any(target.shard.weights.is_cuda for read in reads for target in read.targets)
    local, stop = threading.local(), threading.Event()

    def run(read: Read) -> int:
        try:
            if stop.is_set():
                return 0
            if not hasattr(local, "buffer"):
                local.buffer = torch.empty(largest, dtype=torch.uint8, pin_memory=pinned)
            buffer = memoryview(local.buffer.numpy())
            rows = read_chunk(storage, read.folder, read.entry, read.chunk, buffer)
            read.stage.await_turn()
            for target in read.targets:
                target.lay(rows, read.entry.extent)
        except BaseException:
            stop.set()
            raise
        finally:
            read.stage.leave()
        return read.chunk.length

    bytes_read = 0
    with ThreadPoolExecutor(num_threads, thread_name_prefix="cpr-load") as pool:
        try:
            for done in as_completed([pool.submit(run, read) for read in reads]):
                bytes_read += done.result()
                if progress is not None:
                    progress(done.result())
        finally:
            stop.set()
    buffer_bytes = largest * min(num_threads, len(reads))
    return LoadStats(bytes_read, time.perf_counter() - began, buffer_bytes)


def _check_large(storage: Storage, read: Read) -> None:
    """A forged length must not take all memory."""
    if read.chunk.length > LARGE_CHUNK_BYTES:
        path = f"{read.folder}/{read.entry.path}"
        if (size := storage.size(path)) < read.chunk.offset + read.chunk.length:
            raise CorruptFileError(
                f"{storage.uri}/{path} has {size} bytes, and its manifest a chunk of {read.chunk.length} at "
                f"byte {read.chunk.offset}: one of them is damaged; load an older state"
            )
