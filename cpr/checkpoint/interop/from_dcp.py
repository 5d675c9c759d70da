"""Makes the first save of a checkpoint directory from a directory of `torch.distributed.checkpoint`.

Tables become row files. A row file holds pieces that lie one after the other there; one piece at a time is
in memory, with its optimizer state, so an import needs as much memory as the largest piece that was saved.
"""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Final

import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import committed, find_states
from cpr.checkpoint.format.manifest import Manifest, save_folder
from cpr.checkpoint.format.part import merge_tables
from cpr.checkpoint.format.rows import Rows
from cpr.checkpoint.interop.dcp_source import DcpSource
from cpr.checkpoint.interop.dcp_tables import Block, DcpTable
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.save.rank_writer import PartWriter
from cpr.checkpoint.save.snapshot import Piece
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError
from cpr.shards.shard import TableShard

CHUNK_BYTES: Final = 8 * 2**20
"""Of rows that can be read alone later."""
SEQUENCE: Final = 0
"""Of the save that is made."""

Progress = Callable[[int], object]


def import_dcp(source: DcpSource, storage: Storage, progress: Progress = lambda _: None) -> Manifest:
    """Write a base with everything in `source`.

    Args:
        source: see `open_source`.
        storage: a checkpoint directory without saves.
        progress: called with the bytes of table rows written since the last call.

    Raises:
        ValueError: `storage` holds saves.
        LockedError: a run that is alive writes there.
        CheckpointError: something cannot be read or written; nothing counts then.
    """
    run_id = uuid.uuid4().hex
    lock = DirectoryLock(storage, run_id)
    lock.acquire(partial(committed, storage))
    try:
        _make_sure_it_is_empty(storage)
        with _writer(storage, save_folder(SEQUENCE, lock.epoch)) as writer:
            for table in source.tables:
                _write_table(table, source, writer, progress)
            for rank, tree in source.trees.items():
                writer.write_state(tree, rank)
            part = writer.finish({table.fqn: table.entry for table in source.tables})
        manifest = Manifest(
            run_id=run_id,
            sequence=SEQUENCE,
            epoch=lock.epoch,
            kind="base",
            parent=None,
            base=SEQUENCE,
            moment="consistent",
            step=source.step,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world_size=source.world_size,
            tables=merge_tables([part]),
            rows=tuple(part.rows),
            states=tuple(part.states),
        )
        lock.check()
        with storage.create(manifest.path) as sink:
            sink.write(memoryview(manifest.to_json()))
        lock.check()  # a newer owner may not have found it: then it does not count
    finally:
        lock.release()
    return manifest


def _make_sure_it_is_empty(storage: Storage) -> None:
    """Remove what an import that was killed has left; refuse everything else."""
    states, refused = find_states(storage)
    if states or not all(save.unfinished for save in refused):
        raise ValueError(f"{storage.uri} holds saves already; name an empty directory")
    for save in refused:
        storage.delete(save.folder)


@contextmanager
def _writer(storage: Storage, folder: str) -> Iterator[PartWriter]:
    """A writer; after an error nothing of what it wrote is left."""
    writer = PartWriter(storage, folder, "exact", with_ids=False)
    try:
        yield writer
    except BaseException:
        writer.abandon()
        storage.delete(folder)
        raise


def _write_table(table: DcpTable, source: DcpSource, writer: PartWriter, progress: Progress) -> None:
    wanted = table.entry.rows * table.entry.cols
    found = sum(block.num_rows * block.num_cols for block in table.blocks)
    if found != wanted:
        raise CorruptFileError(
            f"table {table.fqn} has {wanted} weights, and the pieces of it that are there have {found}: the "
            "directory is damaged, or was not saved by all ranks"
        )
    for block in table.blocks:
        shard = _shard(table, block)
        rows_at_once = max(1, CHUNK_BYTES // shard.bytes_per_row)
        first_row = block.row_offset
        for num_rows in block.pieces:
            columns = _read_piece(table, block, source, first_row, num_rows)
            for begin in range(0, num_rows, rows_at_once):
                rows = {name: values[begin : begin + rows_at_once] for name, values in columns.items()}
                no_buffer = torch.empty(0)
                writer.write(Piece(shard, Rows(first_row + begin, None, rows), no_buffer, source.step))
                progress(sum(values.nbytes for values in rows.values()))
            first_row += num_rows


def _shard(table: DcpTable, block: Block) -> TableShard:
    """A shard as a writer wants to know it: place and data types, but no rows."""

    def column(name: str) -> Tensor:
        entry = table.entry.columns[name]
        shape = (block.num_rows,) if entry.per_row else (block.num_rows, block.num_cols)
        return torch.empty(shape, dtype=getattr(torch, entry.dtype), device="meta")

    return TableShard(
        table_fqn=table.fqn,
        table_shape=(table.entry.rows, table.entry.cols),
        row_offset=block.row_offset,
        col_offset=block.col_offset,
        replicated=False,
        weights=column("weights"),
        optimizer_state={name: column(name) for name in table.entry.columns if name != "weights"},
    )


def _read_piece(
    table: DcpTable, block: Block, source: DcpSource, first_row: int, num_rows: int
) -> dict[str, Tensor]:
    columns = {}
    for name, entry in table.entry.columns.items():
        dcp_name = table.names[name]
        if not entry.per_row:
            offsets, sizes = (first_row, block.col_offset), (num_rows, block.num_cols)
            columns[name] = source.directory.read(dcp_name, offsets, sizes)
            continue
        dims = len(source.directory.tensors[dcp_name].size)
        offset = table.state_offset(name, block, source.directory) + first_row
        values = source.directory.read(dcp_name, (offset, 0)[:dims], (num_rows, 1)[:dims])
        columns[name] = values.reshape(num_rows)
    return columns
