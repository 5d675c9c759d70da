"""Compaction of one shard: a base and the row saves after it become a new base, chunk by chunk.

Row ids ascend through a file of a row save, so each file is read once, front to back, while the base is
rewritten chunk after chunk; no shard is ever in memory as a whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from cpr.checkpoint.format.manifest import RowFileEntry
from cpr.checkpoint.format.row_file import RowBatch, RowFileWriter, read_chunk
from cpr.checkpoint.storage.base import Sink, Storage

Layer = tuple[str, RowFileEntry]
"""Folder of a save, and a file in it."""


def merge_row_files(storage: Storage, layers: Sequence[Layer], target: Sink, path: str) -> RowFileEntry:
    """Write a base with the newest version of each row to `target`, whose path in its save is `path`.

    Memory: one chunk of each layer. Weights are written exactly as the layers' codecs decode them. The layers
    are files of one shard from a chain of checked manifests: a base, then row saves, oldest first.

    Raises:
        CorruptFileError: a chunk is missing, damaged, or not what its manifest says.
        CheckpointError: the target cannot be written.
    """
    folder, base = layers[0]
    writer = RowFileWriter(target, shard=base.extent, columns=base.columns, codec="exact", with_ids=False)
    cursors = [_Cursor(storage, layer) for layer in layers[1:]]
    buffer = _buffer(base)
    for chunk in base.chunks:
        rows = read_chunk(storage, folder, base, chunk, buffer)
        for cursor in cursors:
            cursor.overwrite(rows)
        writer.write(rows)
    entries = [entry for _, entry in layers]
    first_step, last_step = min(each.first_step for each in entries), max(each.last_step for each in entries)
    merged = writer.finish(path, first_step, last_step)
    return replace(merged, max_error=max(each.max_error for each in entries))


class _Cursor:
    """Reads the file of a row save once, front to back."""

    def __init__(self, storage: Storage, layer: Layer) -> None:
        self._chunks = self._read(storage, layer)
        self._rows = next(self._chunks, None)

    def overwrite(self, base: RowBatch) -> None:
        """Copy the rows that are also in `base` into it; called with the base's chunks in ascending order."""
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
    def _read(storage: Storage, layer: Layer) -> Iterator[RowBatch]:
        folder, entry = layer
        buffer = _buffer(entry)
        for chunk in entry.chunks:
            yield read_chunk(storage, folder, entry, chunk, buffer)


def _buffer(entry: RowFileEntry) -> memoryview:
    return np.empty(max((chunk.length for chunk in entry.chunks), default=0), dtype=np.uint8).data
