"""Loads a saved state into live shards under any sharding plan, and reads state files.

Every chunk of a row file names its rows and columns, and goes to all local shards that hold some of them. No
other chunk is read, and none is copied whose digest differs.

Chunks are read in parallel and copied in an order in which old rows never overwrite new ones. Those of one
table in one save hold different rows or columns, so they may be copied in any order; those of the next save
wait for all of them, with their bytes already read and verified, so that many small row saves on a remote
store do not cost one round trip each.

Rows are copied into the live tensors of a shard from whatever shards they were saved. Weights and optimizer
state with one number per element are copied column by column. An optimizer with one number per row (row-wise
Adagrad) keeps one for each *shard* of the row where a table is split by columns. So under another split there
is no exact value: a shard that is a part of a saved one takes its number, and a shard that covers several
takes their mean, weighted by the columns in common; the mean of equal numbers is exact. To average the newest
numbers of all saves, they are kept apart until the end, in one vector for each range of columns between edges
of saved shards; a shard that was saved with its present columns needs none.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.verify import check_cover
from cpr.checkpoint.format.manifest import ChunkEntry, RowFileEntry, TableEntry, digest
from cpr.checkpoint.format.part import table_entry
from cpr.checkpoint.format.row_file import RowBatch, read_chunk
from cpr.checkpoint.format.tree_file import decode_state
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError, MismatchError
from cpr.extent import Extent, common
from cpr.shards.shard import TableShard

Index = slice | Tensor
"""Index of rows of a tensor: a range, or int64 `[n]`."""

MEAN_ROWS: Final = 2**20


class Target:
    """A live shard that saved rows are copied into, oldest first.

    Several threads may copy disjoint rows at the same time. `sources` are the extents of all saved shards
    with rows that will be copied, and perhaps others.
    """

    def __init__(self, shard: TableShard, sources: Iterable[Extent]) -> None:
        self.shard, self.extent = shard, shard.extent
        self._columns = {name: column.detach() for name, column in shard.columns.items()}
        edges = {edge for each in sources if (part := each.overlap(self.extent)) for edge in part.cols}
        self._ranges = list(pairwise(sorted(edges)))
        self._apart: dict[str, list[Tensor]] = {}
        if len(self._ranges) > 1:
            for name, column in self._columns.items():
                if column.dim() == 1:  # uninitialised, so that pages without saved rows are never touched
                    self._apart[name] = [torch.empty_like(column, device="cpu") for _ in self._ranges]

    def wants(self, first_row: int, last_row: int) -> bool:
        """Whether the shard holds at least one row from `first_row` to `last_row`, both included."""
        return common(self.extent.rows, (first_row, last_row + 1)) is not None

    def write(self, rows: RowBatch, source_extent: Extent) -> None:
        """Overwrite rows by those of a saved shard of some extent; rows that are not held are ignored."""
        part = source_extent.overlap(self.extent)
        if part is None:
            return
        begin, end = part.cols
        here = slice(begin - self.extent.col_offset, end - self.extent.col_offset)
        there = slice(begin - source_extent.col_offset, end - source_extent.col_offset)
        source, target = self._choose(rows)
        for name, column in self._columns.items():
            saved = rows.columns[name]
            if column.dim() == 2:
                _copy(saved[:, there], source, column[:, here], target)
            elif name not in self._apart:
                _copy(saved, source, column, target)
            else:
                for (low, high), apart in zip(self._ranges, self._apart[name], strict=True):
                    if begin <= low and high <= end:
                        _copy(saved, source, apart, target)

    def finish(self) -> None:
        """Average the row-wise state of several saved shards; called once, after all rows were copied."""
        widths = [high - low for low, high in self._ranges]
        for name, vectors in self._apart.items():
            column = self._columns[name]
            for begin in range(0, self.shard.num_rows, MEAN_ROWS):
                rows = slice(begin, begin + MEAN_ROWS)
                parts = [vector[rows].double() * width for vector, width in zip(vectors, widths, strict=True)]
                mean = torch.stack(parts).sum(0) / sum(widths)
                _copy(mean, slice(None), column, rows)

    def _choose(self, rows: RowBatch) -> tuple[slice, Index]:
        """The range of `rows` that the shard holds, and the index of these rows in the shard."""
        first, (offset, after_last) = rows.first_row, self.extent.rows
        if rows.ids is None:
            begin, end = max(first, offset), min(first + len(rows), after_last)
            return slice(begin - first, end - first), slice(begin - offset, end - offset)
        chosen = slice(*torch.searchsorted(rows.ids, torch.tensor([offset, after_last])).tolist())
        return chosen, rows.ids[chosen] - offset


def _copy(source: Tensor, chosen: slice, target: Tensor, rows: Index) -> None:
    values = source[chosen]
    if isinstance(rows, slice):
        target[rows].copy_(values)
    else:
        values = values.to(target.device, target.dtype)
        target.index_copy_(0, rows.to(target.device), values)


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
    by_table: dict[str, list[Target]] = {}
    for target in targets:
        by_table.setdefault(target.shard.table_fqn, []).append(target)
    for save in state.saves:
        stages = {table_fqn: _Stage(newest.get(table_fqn)) for table_fqn in by_table}
        for entry in save.rows:
            others = by_table.get(entry.table_fqn, ())
            holders = [target for target in others if target.extent.overlap(entry.extent)]
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
    with ThreadPoolExecutor(storage.readers, thread_name_prefix="cpr-load") as pool:
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


def load_shards(
    storage: Storage,
    state: State,
    shards: Sequence[TableShard],
    progress: Callable[[int], None] | None = None,
    weights_only: bool = False,
) -> int:
    """Overwrite shards (weights, optimizer state and counters) with a saved state; returns the bytes read.

    The shards are all or some of this rank's, under any sharding plan. `progress` is called in this thread
    with the bytes of each chunk that is done; they add up to `bytes_to_read`. With `weights_only`, shards may
    lack optimizer state that was saved, which is passed over.

    Raises:
        MismatchError: the state is of another model; nothing has been changed.
        CorruptFileError: a file is missing, truncated or damaged, and is named, or the state lacks rows. The
            shards may hold a mixture then: load an older state over them.
        CheckpointError: the storage fails; shards may hold a mixture, too.
    """
    reads, targets = _plan(state, shards, weights_only)
    counters = [pair for shard in shards for pair in _counters(state, shard)]
    with _writing(shards):
        bytes_read = run_reads(storage, reads, progress)
        for target in targets:
            target.finish()
        for counter, value in counters:
            counter.copy_(value)
    return bytes_read


def bytes_to_read(state: State, shards: Sequence[TableShard], weights_only: bool = False) -> int:
    """Number of bytes that `load_shards` will read.

    Raises:
        MismatchError, CorruptFileError: as `load_shards`, before anything is read.
    """
    reads, _ = _plan(state, shards, weights_only)
    for shard in shards:
        _counters(state, shard)
    return sum(read.chunk.length for read in reads)


def read_state_file(storage: Storage, state: State, rank: int | None) -> Any | None:
    """Read the state file of a rank, or that for all ranks (None).

    Returns:
        The saved tree; None if there is no such file, as for a rank beyond the world size of the save.

    Raises:
        CorruptFileError: the file is missing, truncated or damaged.
    """
    for entry in state.newest.states:
        if entry.rank == rank:
            path = f"{state.newest.folder}/{entry.path}"
            if (size := storage.size(path)) != entry.num_bytes:
                raise CorruptFileError(
                    f"{path} has {size} bytes, the manifest says {entry.num_bytes}; load an older state"
                )
            data = memoryview(bytearray(size))
            storage.read_into(path, 0, data)
            if digest(data) != entry.digest:
                raise CorruptFileError(
                    f"{path} differs from its digest in the manifest: it is damaged; load an older state"
                )
            return decode_state(data, path, state.newest, rank)
    return None


def _counters(state: State, shard: TableShard) -> list[tuple[Tensor, Tensor]]:
    """Counters of a shard with their saved values; left out if not saved, as kernels have different ones."""
    saved = state.newest.tables[shard.table_fqn].counters
    found = []
    for name in shard.counters.keys() & saved.keys():
        counter = shard.counters[name]
        try:
            found.append((counter, torch.full_like(counter, saved[name])))
        except RuntimeError as error:
            raise CorruptFileError(
                f"{state.newest.path}: {name} of {shard.table_fqn} is {saved[name]}, which is no "
                f"{counter.dtype}"
            ) from error
    return found


def _plan(state: State, shards: Sequence[TableShard], weights_only: bool) -> tuple[list[Read], list[Target]]:
    for shard in shards:
        check_fit(state, shard, weights_only)
    targets = []
    for shard in shards:
        entries = (entry for save in state.saves for entry in save.rows_of(shard.table_fqn))
        targets.append(Target(shard, (entry.extent for entry in entries)))
    return plan_reads(state, targets), targets


@contextmanager
def _writing(shards: Sequence[TableShard]) -> Iterator[None]:
    # Tables share device caches: rows of other shards in a cache must not be lost.
    for shard in shards:
        shard.flush()
    try:
        yield
    finally:
        for shard in shards:
            shard.invalidate()


def check_fit(state: State, shard: TableShard, weights_only: bool = False) -> None:
    """Refuse a state of another model, and one that does not hold each row of the shard exactly once.

    With `weights_only`, columns that were saved and that the shard lacks are no difference.

    Raises:
        MismatchError: the table is missing in the state, or has other rows, columns, data types or optimizer
            states; names the table and both values.
        CorruptFileError: some of the shard's rows are missing in the base, or in two files of a save.
    """
    path = state.newest.path
    saved = state.newest.tables.get(shard.table_fqn)
    if saved is None:
        raise MismatchError(
            f"{path} has no table {shard.table_fqn}; it has {_listed(state.newest.tables)}. Load it into the "
            "model that it was saved from, or give this model a checkpoint directory of its own"
        )
    live, compared = table_entry(shard), saved
    if weights_only:
        kept = {name: column for name, column in saved.columns.items() if name in live.columns}
        compared = replace(saved, columns=kept)
    differences = [
        ("size", f"{live.rows} x {live.cols}", f"{saved.rows} x {saved.cols}"),
        ("columns", _columns(live), _columns(compared)),
    ]
    for what, here, there in differences:
        if here != there:
            raise MismatchError(
                f"table {shard.table_fqn}: its {what} in this model: {here}; in {path}: {there}. Build the "
                "model with the tables, data types and optimizer it was saved with (see `cpr describe`), "
                "or give this model a checkpoint directory of its own"
            )
    for save in state.saves:
        check_cover(save, shard.extent)


def _columns(table: TableEntry) -> str:
    return _listed(
        f"{name} ({column.dtype} per {'row' if column.per_row else 'element'})"
        for name, column in table.columns.items()
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
