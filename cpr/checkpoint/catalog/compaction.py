"""Merging: a base and the row saves after it become a new base, without the whole shard ever in memory.

Row ids ascend through a file of a row save, so each of them is read once, front to back, while the base goes
by chunk after chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from cpr.checkpoint.format.manifest import ROW, RowFileEntry
from cpr.checkpoint.format.row_file import RowFileWriter, Rows, read_chunk
from cpr.checkpoint.storage.base import Sink, Storage
from cpr.errors import CorruptFileError

Layer = tuple[str, RowFileEntry]
"""Folder of a save, and a file in it."""


def merge_row_files(storage: Storage, layers: Sequence[Layer], target: Sink, path: str) -> RowFileEntry:
    """Lay row saves over a base.

    Memory: one chunk of each layer. Weights are written exactly as the layers' codecs give them back.

    Args:
        storage: where the layers are.
        layers: files of one shard: a base, then row saves, oldest first. A row that is in several is taken
            from the last of them.
        target: where the new base goes.
        path: of the new base, relative to its save's folder.

    Raises:
        ValueError: the layers are not a base and row saves of one shard.
        CorruptFileError: a chunk is missing, damaged, or not what its manifest says.
        CheckpointError: the target cannot be written.
    """
    _check(storage, layers)
    folder, base = layers[0]
    writer = RowFileWriter(
        target,
        shard=base.extent,
        columns=base.columns,
        codec="exact",
        with_ids=False,
    )
    cursors = [_Cursor(storage, layer) for layer in layers[1:]]
    buffer = _buffer(base)
    for chunk in base.chunks:
        rows = read_chunk(storage, folder, base, chunk, buffer)
        for cursor in cursors:
            cursor.lay_over(rows)
        writer.write(rows)
    entry = writer.finish(
        path,
        min(layer.first_step for _, layer in layers),
        max(layer.last_step for _, layer in layers),
    )
    return replace(entry, max_error=max(layer.max_error for _, layer in layers))


class _Cursor:
    """Goes through a row save's file once."""

    def __init__(self, storage: Storage, layer: Layer) -> None:
        self._chunks = self._read(storage, layer)
        self._rows = next(self._chunks, None)

    def lay_over(self, base: Rows) -> None:
        """Copy those rows that are in both into the base's; bases come in ascending order."""
        while self._rows is not None and self._rows.first_row <= base.last_row:
            ids = self._rows.ids
            assert ids is not None
            bounds = torch.tensor([base.first_row, base.last_row + 1])
            begin, end = torch.searchsorted(ids, bounds).tolist()
            target = ids[begin:end] - base.first_row
            for name, column in self._rows.columns.items():
                base.columns[name].index_copy_(0, target, column[begin:end])
            if end < len(ids):
                return
            self._rows = next(self._chunks, None)

    @staticmethod
    def _read(storage: Storage, layer: Layer) -> Iterator[Rows]:
        folder, entry = layer
        buffer = _buffer(entry)
        for chunk in entry.chunks:
            yield read_chunk(storage, folder, entry, chunk, buffer)


def _buffer(entry: RowFileEntry) -> memoryview:
    return np.empty(max((chunk.length for chunk in entry.chunks), default=0), dtype=np.uint8).data


def _check(storage: Storage, layers: Sequence[Layer]) -> None:
    if not layers:
        raise ValueError("there is nothing to merge: the first layer must be a base")
    _, base = layers[0]
    for index, (folder, entry) in enumerate(layers):
        path = f"{storage.uri}/{folder}/{entry.path}"
        if (ROW in entry.columns) != (index > 0):
            raise ValueError(f"{path} is layer {index}: the first must be a base, the others row saves")
        columns = {name: column for name, column in entry.columns.items() if name != ROW}
        if entry.extent != base.extent or columns != base.columns:
            raise ValueError(f"{path} holds another shard, or other columns, than the base {base.path}")
        _check_order(entry, path)


def _check_order(entry: RowFileEntry, path: str) -> None:
    """Chunks ascend; those of a base leave nothing out. What is in a chunk is checked when it is read."""
    is_base = ROW not in entry.columns
    next_row = entry.row_offset
    for chunk in entry.chunks:
        if chunk.first_row < next_row or (is_base and chunk.first_row > next_row):
            raise CorruptFileError(f"{path}: the manifest has row {chunk.first_row} where {next_row} is next")
        next_row = chunk.last_row + 1
    end = entry.row_offset + entry.num_rows
    if next_row > end or (is_base and next_row < end):
        raise CorruptFileError(
            f"{path}: the manifest's chunks end before row {next_row}, the shard before {end}"
        )
