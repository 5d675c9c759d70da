"""Loads a saved state into live shards under any sharding plan, and reads state files.

Every chunk of a row file names its rows and columns, and goes to all local shards that hold some of them. No
other chunk is read, and none is copied whose digest differs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.catalog.verify import check_cover
from cpr.checkpoint.format.manifest import TableEntry, digest
from cpr.checkpoint.format.part import table_entry
from cpr.checkpoint.format.tree_file import decode_state
from cpr.checkpoint.load.reading import Read, plan_reads, run_reads
from cpr.checkpoint.load.scatter import Target
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError, MismatchError
from cpr.shards.shard import TableShard


def load_shards(
    storage: Storage,
    state: State,
    shards: Sequence[TableShard],
    progress: Callable[[int], None] | None = None,
) -> int:
    """Overwrite shards (weights, optimizer state and counters) with a saved state; returns the bytes read.

    The shards are all or some of this rank's, under any sharding plan. `progress` is called in this thread
    with the bytes of each chunk that is done; they add up to `bytes_to_read`.

    Raises:
        MismatchError: the state is of another model; nothing has been changed.
        CorruptFileError: a file is missing, truncated or damaged, and is named, or the state lacks rows. The
            shards may hold a mixture then: load an older state over them.
        CheckpointError: the storage fails; shards may hold a mixture, too.
    """
    reads, targets = _plan(state, shards)
    counters = [pair for shard in shards for pair in _counters(state, shard)]
    with _writing(shards):
        bytes_read = run_reads(storage, reads, progress)
        for target in targets:
            target.finish()
        for counter, value in counters:
            counter.copy_(value)
    return bytes_read


def bytes_to_read(state: State, shards: Sequence[TableShard]) -> int:
    """Number of bytes that `load_shards` will read.

    Raises:
        MismatchError, CorruptFileError: as `load_shards`, before anything is read.
    """
    reads, _ = _plan(state, shards)
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


def _plan(state: State, shards: Sequence[TableShard]) -> tuple[list[Read], list[Target]]:
    for shard in shards:
        check_fit(state, shard)
    sources = [entry.extent for save in state.saves for entry in save.rows]
    targets = [Target(shard, sources) for shard in shards]
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


def check_fit(state: State, shard: TableShard) -> None:
    """Refuse a state of another model, and one that does not hold each row of the shard exactly once.

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
    live = table_entry(shard)
    differences = [
        ("size", f"{live.rows} x {live.cols}", f"{saved.rows} x {saved.cols}"),
        ("columns", _columns(live), _columns(saved)),
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
