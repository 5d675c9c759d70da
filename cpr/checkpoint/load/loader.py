"""From a saved state to live shards: whole shards, chosen rows of one, and what is no table.

The layout that was saved does not matter: every chunk of a row file names its rows and columns, and goes to
all shards here that hold some of them. No other chunk is read, and none is laid that differs from its digest.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.format.manifest import digest
from cpr.checkpoint.format.tree_file import decode_state
from cpr.checkpoint.load.fit import check_fit
from cpr.checkpoint.load.reading import LoadStats, Read, plan_reads, run_reads
from cpr.checkpoint.load.scatter import Target
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError
from cpr.shards.shard import TableShard

NUM_THREADS: Final = 4
"""Of a load, unless asked for otherwise. More help where the storage is far away."""


def load_shards(
    storage: Storage,
    state: State,
    shards: Sequence[TableShard],
    *,
    num_threads: int = NUM_THREADS,
    progress: Callable[[int], None] | None = None,
) -> LoadStats:
    """Overwrite whole shards, weights, optimizer state and counters, with a saved state.

    Args:
        storage: the checkpoint directory.
        state: one that `find_states` found.
        shards: of this rank, all or some, under any sharding plan.
        num_threads: that read, verify and copy.
        progress: called in this thread with the bytes of each chunk that is done; they add up to
            `bytes_to_read`.

    Raises:
        MismatchError: the state is of another model; nothing has been changed.
        CorruptFileError: a file is missing, truncated or damaged, and is named, or the state lacks rows. What
            the shards hold then may be a mixture: load an older state over it.
        CheckpointError: the storage fails; likewise.
    """
    reads, targets = _plan(state, shards)
    counters = [pair for shard in shards for pair in _counters(state, shard)]
    with _writing(shards):
        stats = run_reads(storage, reads, num_threads, progress)
        for target in targets:
            target.finish()
        for counter, value in counters:
            counter.copy_(value)
    return stats


def load_rows(storage: Storage, state: State, shard: TableShard, rows: Tensor) -> LoadStats:
    """Overwrite some rows of a shard, with their optimizer state, and leave all else as it is.

    Args:
        storage: the checkpoint directory.
        state: one that `find_states` found.
        shard: of this rank.
        rows: row ids of the table, any integer dtype and order; duplicates count once.

    Raises:
        ValueError: the shard does not hold such rows.
        MismatchError: the state is of another model; nothing has been changed.
        CheckpointError: as for `load_shards`; some of these rows may have been overwritten, no others.
    """
    ids = torch.unique(rows.detach().to("cpu", torch.int64))
    end = shard.row_offset + shard.num_rows
    if ids.numel() and not (shard.row_offset <= ids[0] and ids[-1] < end):
        raise ValueError(
            f"rows {int(ids[0])} to {int(ids[-1])} were asked of {shard.name}, which holds rows "
            f"{shard.row_offset} to {end - 1}"
        )
    reads, targets = _plan(state, [shard], ids)
    with _writing([shard]):
        stats = run_reads(storage, reads, NUM_THREADS, None)
        targets[0].finish()
    return stats


def bytes_to_read(state: State, shards: Sequence[TableShard]) -> int:
    """What `load_shards` will read, for a progress bar.

    Raises:
        MismatchError, CorruptFileError: as `load_shards` does.
    """
    reads, _ = _plan(state, shards)
    for shard in shards:
        _counters(state, shard)
    return sum(read.chunk.length for read in reads)


def read_state_file(storage: Storage, state: State, rank: int | None) -> Any | None:
    """What was saved beside the tables.

    Args:
        storage: the checkpoint directory.
        state: one that `find_states` found.
        rank: whose; None: what is the same for all ranks.

    Returns:
        The tree that was saved; None if there is no such file, as for a rank that did not exist then.

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
    """Counters of a shard and the values for them; kernels differ in what they count."""
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


def _plan(
    state: State, shards: Sequence[TableShard], ids: Tensor | None = None
) -> tuple[list[Read], list[Target]]:
    for shard in shards:
        check_fit(state, shard)
    sources = [entry.extent for save in state.saves for entry in save.rows]
    targets = [Target(shard, sources, ids) for shard in shards]
    return plan_reads(state, targets), targets


@contextmanager
def _writing(shards: Sequence[TableShard]) -> Iterator[None]:
    # Device caches are shared by tables: rows of other shards in them must not be lost.
    for shard in shards:
        shard.flush()
    try:
        yield
    finally:
        for shard in shards:
            shard.invalidate()
