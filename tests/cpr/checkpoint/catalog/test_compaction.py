"""Compaction keeps the newest version of each row, reads each chunk once, and verifies all of them."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cpr.checkpoint.catalog.compaction import Layer, merge_row_files
from cpr.checkpoint.format.manifest import ColumnEntry, RowFileEntry
from cpr.checkpoint.format.row_file import RowBatch, RowFileWriter, read_chunk
from cpr.checkpoint.storage.local import LocalStorage
from cpr.extent import Extent
from tests.cpr.checkpoint.saves import MemoryStorage

PATH = "model.t/r100-c4.arrow"
PLACE = Extent(
    table_fqn="model.t", table_shape=(1_000, 16), row_offset=100, num_rows=40, col_offset=4, num_cols=3
)
COLUMNS = {
    "weights": ColumnEntry(dtype="float32", per_row=False),
    "sum": ColumnEntry(dtype="float32", per_row=True),
}
BASE_BOUNDS = [0, 7, 8, 25, 40]
"""Where the base's chunks begin and end."""


def values(layer: int, ids: Tensor) -> dict[str, Tensor]:
    """Values that name their layer, row and column."""
    names = layer * 1_000 + ids.float()
    return {"weights": names[:, None] + torch.arange(3) / 4, "sum": names + 0.75}


def write_layer(
    storage, layer: int, ids: Sequence[int] | None, bounds: Sequence[int], codec: str = "exact"
) -> Layer:
    folder = f"saves/{layer:08d}"
    rows = torch.tensor(range(100, 140) if ids is None else ids, dtype=torch.int64)
    with storage.create(f"{folder}/{PATH}") as sink:
        writer = RowFileWriter(sink, shard=PLACE, columns=COLUMNS, codec=codec, with_ids=ids is not None)
        for begin, end in pairwise(bounds):
            some = rows[begin:end]
            if len(some):
                writer.write(RowBatch(int(some[0]), None if ids is None else some, values(layer, some)))
        return folder, writer.finish(PATH, first_step=10 * layer, last_step=10 * layer + 5)


def merge(storage, layers: Sequence[Layer]) -> RowFileEntry:
    with storage.create(f"saves/merged/{PATH}") as sink:
        return merge_row_files(storage, layers, sink, PATH)


def rows_of(storage, folder: str, entry: RowFileEntry) -> dict[str, Tensor]:
    chunks = [read_chunk(storage, folder, entry, chunk) for chunk in entry.chunks]
    return {name: torch.cat([rows.columns[name] for rows in chunks]) for name in COLUMNS}


def three_layers(storage, codec: str = "exact") -> list[Layer]:
    return [
        write_layer(storage, 1, None, BASE_BOUNDS),
        write_layer(storage, 2, [100, 106, 107, 108, 130, 131], [0, 2, 5, 6], codec),
        write_layer(storage, 3, [107, 120, 139], [0, 3], codec),
    ]


@given(
    st.lists(
        st.tuples(st.sets(st.integers(100, 139)).map(sorted), st.lists(st.integers(0, 40), max_size=3)),
        max_size=4,
    )
)
def test_compaction_keeps_the_newest_version_of_each_row(row_saves):
    storage = MemoryStorage()
    layers = [write_layer(storage, 1, None, BASE_BOUNDS)]
    expected = values(1, torch.arange(100, 140))
    for layer, (ids, cuts) in enumerate(row_saves, start=2):
        bounds = sorted({0, len(ids), *(min(cut, len(ids)) for cut in cuts)})
        layers.append(write_layer(storage, layer, ids, bounds))
        rows = torch.tensor(ids, dtype=torch.int64)
        for name, column in values(layer, rows).items():
            expected[name][rows - 100] = column
    storage.reads.clear()
    entry = merge(storage, layers)
    # Each chunk of each layer once.
    assert sorted(storage.reads) == sorted(
        (f"{folder}/{PATH}", chunk.offset, chunk.length) for folder, layer in layers for chunk in layer.chunks
    )
    merged = rows_of(storage, "saves/merged", entry)
    for name, column in expected.items():
        assert torch.equal(merged[name], column)


def test_the_entry_of_a_merged_base(tmp_path):
    storage = LocalStorage(tmp_path)
    layers = three_layers(storage)
    entry = merge(storage, layers)
    base = layers[0][1]
    assert entry == replace(
        base, last_step=35, chunks=entry.chunks, digest=entry.digest, num_bytes=entry.num_bytes
    )
    assert entry.columns.keys() == {"weights", "sum"}
    assert [(c.first_row, c.last_row) for c in entry.chunks] == [
        (c.first_row, c.last_row) for c in base.chunks
    ]
    assert entry.num_bytes == storage.size(f"saves/merged/{PATH}")
    assert rows_of(storage, "saves/merged", entry)["sum"][[0, 1, 7, 39]].tolist() == [
        2_100.75,
        1_101.75,
        3_107.75,
        3_139.75,
    ]


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4"])
def test_compaction_keeps_decoded_weights_exactly(codec):
    storage = MemoryStorage()
    layers = three_layers(storage, codec)
    entry = merge(storage, layers)
    assert entry.codec == "exact"
    assert entry.max_error == max(layer.max_error for _, layer in layers) > 0
    merged, newest = rows_of(storage, "saves/merged", entry), rows_of(storage, *layers[2])
    ids = torch.tensor([107, 120, 139])
    assert torch.equal(merged["weights"][ids - 100], newest["weights"])
    assert torch.equal(merged["sum"][ids - 100], values(3, ids)["sum"])


def test_compaction_holds_one_chunk_of_each_file():
    storage = MemoryStorage()
    layers = [
        write_layer(storage, 1, None, range(41)),
        *(write_layer(storage, layer, range(100, 140), range(41)) for layer in (2, 3)),
    ]
    buffers = set()
    storage.before = lambda *call: call[2] and buffers.add(np.frombuffer(call[2], np.uint8).ctypes.data)
    merge(storage, layers)
    assert len(storage.reads) == 3 * 40
    assert len(buffers) == 3
