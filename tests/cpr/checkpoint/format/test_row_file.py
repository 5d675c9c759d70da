"""Row files: what goes in comes out, any Arrow reader can open them, and no damage goes unseen."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from cpr.checkpoint.format.codecs import CODECS
from cpr.checkpoint.format.manifest import ChunkEntry, ColumnEntry, RowFileEntry
from cpr.checkpoint.format.row_file import DTYPES, RowBatch, RowFileWriter, read_chunk
from cpr.errors import CorruptFileError
from cpr.extent import Extent
from tests.cpr.checkpoint.saves import MemoryStorage

FOLDER, PATH = "saves/00000003", "model.t/r100-c16.arrow"
PLACE = Extent(
    table_fqn="model.t", table_shape=(1_000, 32), row_offset=100, num_rows=60, col_offset=16, num_cols=8
)
COLUMNS = {
    "weights": ColumnEntry(dtype="float32", per_row=False),
    "sum": ColumnEntry(dtype="float32", per_row=True),
    "exp_avg": ColumnEntry(dtype="bfloat16", per_row=False),
}


def make_rows(ids: Sequence[int], with_ids: bool = True, columns=COLUMNS, seed: int = 0) -> RowBatch:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, column in columns.items():
        shape = (len(ids),) if column.per_row else (len(ids), PLACE.num_cols)
        tensors[name] = (torch.randn(shape, generator=generator) * 50).to(DTYPES[column.dtype])
    return RowBatch(
        ids[0] if ids else 100, torch.tensor(ids, dtype=torch.int64) if with_ids else None, tensors
    )


def write(
    storage, chunks: Sequence[RowBatch], with_ids: bool = True, codec: str = "exact", columns=COLUMNS
) -> RowFileEntry:
    with storage.create(f"{FOLDER}/{PATH}") as sink:
        writer = RowFileWriter(sink, shard=PLACE, columns=columns, codec=codec, with_ids=with_ids)
        for rows in chunks:
            writer.write(rows)
        return writer.finish(PATH, first_step=7, last_step=9)


def assert_same(found: RowBatch, expected: RowBatch) -> None:
    assert (found.first_row, found.last_row, len(found)) == (
        expected.first_row,
        expected.last_row,
        len(expected),
    )
    assert (found.ids is None) == (expected.ids is None)
    assert found.ids is None or torch.equal(found.ids, expected.ids)
    assert found.columns.keys() == expected.columns.keys()
    for name, column in expected.columns.items():
        assert found.columns[name].dtype == column.dtype
        assert torch.equal(found.columns[name], column)


BASE = [make_rows(range(100, 125), with_ids=False), make_rows(range(125, 160), with_ids=False, seed=1)]
CHOSEN = [make_rows([100, 103, 109]), make_rows([110], seed=1), make_rows([140, 158, 159], seed=2)]


@pytest.fixture
def storage() -> MemoryStorage:
    return MemoryStorage()


@pytest.fixture
def row_save(storage: MemoryStorage) -> RowFileEntry:
    return write(storage, CHOSEN)


@pytest.mark.parametrize(("chunks", "with_ids"), [(BASE, False), (CHOSEN, True)], ids=["base", "row save"])
def test_chunks_are_read_alone_and_in_any_order(storage, chunks, with_ids):
    entry = write(storage, chunks, with_ids)
    for chunk, rows in reversed(list(zip(entry.chunks, chunks, strict=True))):
        assert_same(read_chunk(storage, FOLDER, entry, chunk), rows)
    # Nothing but the chunks was read, not even the schema.
    assert storage.reads == [
        (f"{FOLDER}/{PATH}", chunk.offset, chunk.length) for chunk in reversed(entry.chunks)
    ]


@given(
    ids=st.sets(st.integers(100, 159)).map(sorted),
    cuts=st.lists(st.integers(0, 60), max_size=3).map(sorted),
    dtypes=st.fixed_dictionaries({"weights": st.sampled_from(sorted(DTYPES))}).flatmap(
        lambda weights: st.dictionaries(
            st.sampled_from(["sum", "exp_avg", "momentum"]), st.sampled_from(sorted(DTYPES))
        ).map(lambda states: {**states, **weights})
    ),
    per_row=st.sets(st.sampled_from(["sum", "exp_avg", "momentum"])),
)
def test_any_rows_any_columns_any_chunks(ids, cuts, dtypes, per_row):
    columns = {name: ColumnEntry(dtype=dtype, per_row=name in per_row) for name, dtype in dtypes.items()}
    bounds = [0, *(min(cut, len(ids)) for cut in cuts), len(ids)]
    chunks = [make_rows(ids[begin:end], columns=columns) for begin, end in pairwise(bounds)]
    storage = MemoryStorage()
    entry = write(storage, chunks, columns=columns)
    chunks = [rows for rows in chunks if len(rows)]
    assert len(entry.chunks) == len(chunks)
    for chunk, rows in zip(entry.chunks, chunks, strict=True):
        assert_same(read_chunk(storage, FOLDER, entry, chunk), rows)


def test_entry_says_what_is_in_the_file(storage, row_save):
    assert (row_save.path, row_save.first_step, row_save.last_step) == (PATH, 7, 9)
    assert (row_save.table_fqn, row_save.table_shape) == ("model.t", (1_000, 32))
    assert (row_save.row_offset, row_save.num_rows) == (100, 60)
    assert (row_save.col_offset, row_save.num_cols) == (16, 8)
    assert list(row_save.columns.items()) == [
        ("row", ColumnEntry(dtype="int64", per_row=True)),
        *COLUMNS.items(),
    ]
    assert [(c.first_row, c.last_row, c.num_rows) for c in row_save.chunks] == [
        (100, 109, 3),
        (110, 110, 1),
        (140, 159, 3),
    ]
    data = storage.files[f"{FOLDER}/{PATH}"]
    assert (row_save.num_bytes, row_save.digest) == (len(data), xxhash.xxh3_128_hexdigest(data))
    end = row_save.chunks[0].offset
    for chunk in row_save.chunks:
        assert chunk.offset == end  # one after the other, nothing between
        end += chunk.length
        assert chunk.digest == xxhash.xxh3_128_hexdigest(data[chunk.offset : end])


def test_weights_come_first_whatever_the_order_of_the_columns(storage):
    columns = dict(reversed(COLUMNS.items()))
    rows = make_rows(range(100, 160), with_ids=False, columns=columns)
    entry = write(storage, [rows], with_ids=False, columns=columns)
    assert list(entry.columns) == ["weights", "exp_avg", "sum"]
    assert_same(read_chunk(storage, FOLDER, entry, entry.chunks[0]), rows)


@pytest.mark.parametrize("codec", CODECS)
def test_only_weights_are_encoded_and_the_error_is_in_the_entry(storage, codec):
    entry = write(storage, CHOSEN, codec=codec)
    assert entry.codec == codec
    worst = 0.0
    for chunk, rows in zip(entry.chunks, CHOSEN, strict=True):
        found = read_chunk(storage, FOLDER, entry, chunk)
        worst = max(worst, (found.columns["weights"] - rows.columns["weights"]).abs().max().item())
        assert_same(replace_weights(found, rows.columns["weights"]), rows)
    assert entry.max_error == worst
    assert (worst > 0) == (codec not in {"exact", "fp32"})


def replace_weights(rows: RowBatch, weights: torch.Tensor) -> RowBatch:
    return RowBatch(rows.first_row, rows.ids, {**rows.columns, "weights": weights})


# Others read them.


def test_pyarrow_reads_them(storage):
    write(storage, BASE, with_ids=False)
    table = pa.ipc.open_file(storage.files[f"{FOLDER}/{PATH}"]).read_all()
    table.validate(full=True)
    assert table.schema.metadata == {
        b"format": b"cpr-checkpoint 1 rows",
        b"table_fqn": b"model.t",
        b"table_rows": b"1000",
        b"table_cols": b"32",
        b"row_offset": b"100",
        b"num_rows": b"60",
        b"col_offset": b"16",
        b"num_cols": b"8",
        b"codec": b"exact",
    }
    weights = np.stack(table["weights"].to_numpy())
    assert np.array_equal(weights, torch.cat([rows.columns["weights"] for rows in BASE]))
    assert table["exp_avg"].type.value_type == pa.uint16()
    assert table.field("exp_avg").metadata == {b"dtype": b"bfloat16"}


# No copies.


def test_the_sink_gets_the_tensors_own_memory():
    seen = []

    class Sink:
        def write(self, data: memoryview) -> None:
            seen.append((np.frombuffer(data, np.uint8).ctypes.data, data.nbytes))

    writer = RowFileWriter(Sink(), shard=PLACE, columns=COLUMNS, codec="exact", with_ids=True)
    rows = make_rows(range(100, 160))
    writer.write(rows)
    for tensor in (rows.ids, *rows.columns.values()):
        assert (tensor.data_ptr(), tensor.nbytes) in seen


def test_rows_are_views_of_the_readers_buffer(storage, row_save):
    buffer = np.zeros(max(chunk.length for chunk in row_save.chunks) + 100, np.uint8)
    for chunk, expected in zip(row_save.chunks, CHOSEN, strict=True):
        rows = read_chunk(storage, FOLDER, row_save, chunk, buffer.data)
        assert_same(rows, expected)
        for tensor in (rows.ids, *rows.columns.values()):
            assert 0 <= tensor.data_ptr() - buffer.ctypes.data < chunk.length
    buffer[:] = 0
    assert not rows.columns["weights"].any()


# Damage.


@given(data=st.data())
def test_any_flipped_bit_of_a_chunk_is_detected(data):
    storage = MemoryStorage()
    entry = write(storage, CHOSEN)
    chunk = data.draw(st.sampled_from(entry.chunks))
    byte = data.draw(st.integers(chunk.offset, chunk.offset + chunk.length - 1))
    storage.flip_bit(f"{FOLDER}/{PATH}", byte, data.draw(st.integers(0, 7)))
    damaged = storage.files[f"{FOLDER}/{PATH}"][chunk.offset : chunk.offset + chunk.length]
    with pytest.raises(CorruptFileError) as caught:
        read_chunk(storage, FOLDER, entry, chunk)
    for part in (
        f"memory/{FOLDER}/{PATH}",
        f"rows {chunk.first_row} to {chunk.last_row}",
        chunk.digest,
        xxhash.xxh3_128_hexdigest(damaged),
        "Load an older state",
    ):
        assert part in str(caught.value)


def other_chunk(entry: RowFileEntry, **fields) -> tuple[RowFileEntry, ChunkEntry]:
    return entry, replace(entry.chunks[0], **fields)


WRONG_MANIFESTS = {
    "another first row": lambda entry: other_chunk(entry, first_row=101),
    "another last row": lambda entry: other_chunk(entry, last_row=110),
    "another number of rows": lambda entry: other_chunk(entry, num_rows=4),
    "a smaller shard": lambda entry: (replace(entry, num_rows=9), entry.chunks[0]),
    "a later shard": lambda entry: (replace(entry, row_offset=101), entry.chunks[0]),
    "wider rows": lambda entry: (replace(entry, num_cols=9), entry.chunks[0]),
    "no ids": lambda entry: (
        replace(entry, columns={n: c for n, c in entry.columns.items() if n != "row"}),
        entry.chunks[0],
    ),
    "one state more": lambda entry: (
        replace(entry, columns={**entry.columns, "x": ColumnEntry(dtype="float32", per_row=True)}),
        entry.chunks[0],
    ),
    "another codec": lambda entry: (replace(entry, codec="int8"), entry.chunks[0]),
    "an unknown codec": lambda entry: (replace(entry, codec="zip"), entry.chunks[0]),
}


@pytest.mark.parametrize("wrong", WRONG_MANIFESTS.values(), ids=WRONG_MANIFESTS.keys())
def test_a_chunk_that_is_not_what_the_manifest_says(storage, row_save, wrong):
    entry, chunk = wrong(row_save)
    with pytest.raises(CorruptFileError, match=f"{PATH}.* is not what its manifest says"):
        read_chunk(storage, FOLDER, entry, chunk)


def test_ids_that_do_not_ascend_are_refused_when_read(storage, monkeypatch):
    monkeypatch.setattr(RowFileWriter, "_check_rows", lambda self, rows: None)
    entry = write(storage, [make_rows([100, 109, 103, 110])])
    with pytest.raises(CorruptFileError, match=r"not what its manifest says: .* do not ascend"):
        read_chunk(storage, FOLDER, entry, entry.chunks[0])


# What is not written.


REFUSED_ROWS = {
    "descending": (True, [make_rows([103, 100])], "do not ascend"),
    "duplicate": (True, [make_rows([100, 100])], "do not ascend"),
    "before the shard": (True, [make_rows([99, 100])], "not all among 100 to 159"),
    "after the shard": (True, [make_rows([159, 160])], "not all among 100 to 159"),
    "again in the next chunk": (True, [make_rows([100, 105]), make_rows([105])], "not all among 106 to 159"),
    "first row is another": (
        True,
        [replace(make_rows([100, 105]), first_row=99)],
        "do not ascend from row 99",
    ),
    "int32 ids": (True, [replace(make_rows([100]), ids=torch.tensor([100], dtype=torch.int32))], "int64"),
    "too few ids": (True, [replace(make_rows([100, 101]), ids=torch.tensor([100]))], "2 int64 ids"),
    "without ids": (True, [make_rows([100], with_ids=False)], "rows have ids"),
    "with ids": (False, [make_rows([100])], "a base's rows have none"),
    "a gap": (False, [make_rows([100, 101], False), make_rows([103], False)], "they leave out row 102"),
    "a late start": (False, [make_rows([101], False)], "they leave out row 100"),
    "more than the shard": (False, [make_rows(range(100, 161), False)], "100 to 160 are not all among"),
    "an early end": (False, [make_rows(range(100, 140), False)], "lacks rows 140 to 159 of model.t"),
}


@pytest.mark.parametrize(("with_ids", "chunks", "message"), REFUSED_ROWS.values(), ids=REFUSED_ROWS.keys())
def test_rows_outside_the_shard_or_out_of_order_are_refused(storage, with_ids, chunks, message):
    with pytest.raises(ValueError, match=message):
        write(storage, chunks, with_ids)
    assert not storage.files


def test_tensors_of_other_shapes_or_columns_are_refused(storage):
    rows = make_rows([100, 101])
    for name, tensor in {
        "weights": torch.zeros(2, 9),
        "sum": torch.zeros(2, 1),
        "exp_avg": torch.zeros(2, 8),
    }.items():
        with pytest.raises(ValueError, match=f"column {name} of table model.t is torch"):
            write(storage, [RowBatch(100, rows.ids, {**rows.columns, name: tensor})])
    with pytest.raises(ValueError, match="has columns exp_avg, sum, weights, not sum, weights"):
        write(storage, [RowBatch(100, rows.ids, {n: rows.columns[n] for n in ("weights", "sum")})])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sum": COLUMNS["sum"]}, "one must be 'weights'"),
        ({**COLUMNS, "row": COLUMNS["sum"]}, "none 'row'"),
        (
            {**COLUMNS, "sum": ColumnEntry(dtype="complex64", per_row=True)},
            "column sum is complex64; .* float32",
        ),
    ],
)
def test_columns_that_a_file_cannot_hold_are_refused(storage, columns, message):
    with pytest.raises(ValueError, match=message):
        write(storage, [], columns=columns)


def test_values_that_a_codec_cannot_hold_are_refused_with_table_and_rows(storage):
    rows = make_rows([100, 101, 107])
    rows.columns["weights"][2, 3] = torch.nan
    with pytest.raises(ValueError, match=r"table model\.t, rows from 100 on: int8 cannot hold number 2 "):
        write(storage, [rows], codec="int8")
