"""Makes the first save of a checkpoint directory from a directory of `torch.distributed.checkpoint`.

Tables become row files. A row file holds pieces that lie one after the other there; one piece at a time is
in memory, with its optimizer state, so an import needs as much memory as the largest piece that was saved.
"""

import uuid
from typing import Final

from torch import Tensor

from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.format.manifest import Manifest
from cpr.checkpoint.format.part import Part
from cpr.checkpoint.interop.dcp_source import DcpSource
from cpr.checkpoint.interop.dcp_tables import DcpTable
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.save.rank_writer import PartWriter
from cpr.checkpoint.save.whole_base import Progress, write_base, write_rows
from cpr.checkpoint.storage.base import Storage
from cpr.errors import CorruptFileError
from cpr.extent import Extent

SEQUENCE: Final = 0
"""Of the save that is made."""


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

    def choose(_: DirectoryLock) -> tuple[int, str]:
        _make_sure_it_is_empty(storage)
        return SEQUENCE, uuid.uuid4().hex

    def write(writer: PartWriter) -> Part:
        for table in source.tables:
            _write_table(table, source, writer, progress)
        for rank, tree in source.trees.items():
            writer.write_state(tree, rank)
        return writer.finish({table.fqn: table.entry for table in source.tables})

    return write_base(
        storage, choose, write, moment="consistent", step=source.step, world_size=source.world_size
    )


def _make_sure_it_is_empty(storage: Storage) -> None:
    """Remove what an import that was killed has left; refuse everything else."""
    states, refused = find_states(storage)
    if states or not all(save.unfinished for save in refused):
        raise ValueError(f"{storage.uri} holds saves already; name an empty directory")
    for save in refused:
        storage.delete(save.folder)


def _write_table(table: DcpTable, source: DcpSource, writer: PartWriter, progress: Progress) -> None:
    wanted = table.entry.rows * table.entry.cols
    found = sum(block.extent.num_rows * block.extent.num_cols for block in table.blocks)
    if found != wanted:
        raise CorruptFileError(
            f"table {table.fqn} has {wanted} weights, and the pieces of it that are there have {found}: the "
            "directory is damaged, or was not saved by all ranks"
        )
    for block in table.blocks:
        first_row = block.extent.row_offset
        for num_rows in block.pieces:
            rows = (first_row, first_row + num_rows)
            columns = _read_piece(table, block.extent.narrowed(rows, block.extent.cols), source)
            write_rows(writer, block.extent, first_row, columns, source.step, progress)
            first_row += num_rows


def _read_piece(table: DcpTable, piece: Extent, source: DcpSource) -> dict[str, Tensor]:
    columns = {}
    for name, entry in table.entry.columns.items():
        dcp_name = table.names[name]
        if not entry.per_row:
            offsets, sizes = (piece.row_offset, piece.col_offset), (piece.num_rows, piece.num_cols)
            columns[name] = source.directory.read(dcp_name, offsets, sizes)
            continue
        dims = len(source.directory.tensors[dcp_name].size)
        offset = table.state_offset(name, piece, source.directory) + piece.row_offset
        values = source.directory.read(dcp_name, (offset, 0)[:dims], (piece.num_rows, 1)[:dims])
        columns[name] = values.reshape(piece.num_rows)
    return columns
