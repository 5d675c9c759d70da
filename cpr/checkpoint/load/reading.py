"""Reads chunks in parallel and copies them in an order in which old rows never overwrite new ones.

Chunks of one table in one save hold different rows or columns, so they may be copied in any order; those of
the next save wait for all of them, with their bytes already read and verified, so that many small row saves
on a remote store do not cost one round trip each.
"""

import threading
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

NUM_THREADS: Final = 4
"""Threads of a load that read, verify and copy."""
LARGE_CHUNK_BYTES: Final = 64 * 2**20
"""Many times what this program writes; memory for such a chunk is taken only if its file is that large."""


class _Stage:
    """Counts the open chunks of one table in one save; the next save's stage waits for this one."""

    def __init__(self, previous: "_Stage | None") -> None:
        self._previous = previous
        self._open = 0
        self._lock = threading.Lock()
        self._over = threading.Event()

    def add(self) -> None:
        """Count one more chunk; all are added before the first is read."""
        self._open += 1

    def wait_for_previous(self) -> None:
        """Wait until all chunks of the previous save are copied."""
        if self._previous is not None:
            self._previous._over.wait()

    def leave(self) -> None:
        """Count a chunk as copied or failed; a failure stops the load."""
        with self._lock:
            self._open -= 1
            if not self._open:
                self._over.set()


@dataclass(frozen=True, eq=False)
class Read:
    """A chunk to read, and the shards that its rows are copied to."""

    folder: str
    entry: RowFileEntry
    chunk: ChunkEntry
    targets: Sequence[Target]
    stage: _Stage


def plan_reads(state: State, targets: Sequence[Target]) -> list[Read]:
    """All chunks with rows and columns of the targets, each once, oldest save first."""
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


def run_reads(storage: Storage, reads: Sequence[Read], progress: Callable[[int], None] | None) -> int:
    """Read, verify and copy chunks; the first error stops it. Returns the number of bytes read.

    Takes host memory for one chunk per thread, as large as the largest one. The reads are in the planned
    order: a thread that waits for chunks of an older save relies on other threads having taken them before.
    """
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
            read.stage.wait_for_previous()
            for target in read.targets:
                target.write(rows, read.entry.extent)
        except BaseException:
            stop.set()
            raise
        finally:
            read.stage.leave()  # after an error, too, or threads of the next stage would wait for ever
        return read.chunk.length

    bytes_read = 0
    with ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="cpr-load") as pool:
        try:
            for done in as_completed([pool.submit(run, read) for read in reads]):
                bytes_read += done.result()
                if progress is not None:
                    progress(done.result())
        finally:
            stop.set()
    return bytes_read


def _check_large(storage: Storage, read: Read) -> None:
    """Refuse a chunk beyond the end of its file, so that a forged length cannot exhaust memory."""
    if read.chunk.length > LARGE_CHUNK_BYTES:
        path = f"{read.folder}/{read.entry.path}"
        if (size := storage.size(path)) < read.chunk.offset + read.chunk.length:
            raise CorruptFileError(
                f"{storage.uri}/{path} has {size} bytes, and its manifest a chunk of {read.chunk.length} at "
                f"byte {read.chunk.offset}: one of them is damaged; load an older state"
            )
