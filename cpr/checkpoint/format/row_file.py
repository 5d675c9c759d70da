"""Row files: rows of one shard with their optimizer state, as an Arrow IPC file.

Each call of `write` becomes one record batch, called a chunk here: its entry in the manifest says where it is
and which rows it has, so it can be read and verified alone. Bytes go from the tensors' memory to the sink and
from the storage into the reader's buffer without another copy. `FORMAT.md` describes the files.

This module also describes rows in memory, and converts tensors to Arrow and back without a copy.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import torch
import xxhash
from torch import Tensor

from cpr.checkpoint.format.codecs import Codec, codec_named
from cpr.checkpoint.format.manifest import (
    COLUMN_DTYPES,
    FORMAT,
    ROW,
    VERSION,
    WEIGHTS,
    ChunkEntry,
    ColumnEntry,
    RowFileEntry,
    digest,
)
from cpr.checkpoint.format.tree_file import DAMAGE
from cpr.checkpoint.storage.base import HashingSink, Sink, Storage
from cpr.errors import CorruptFileError
from cpr.extent import Extent

_ARROW_TYPES: Final = {
    torch.float64: pa.float64(),
    torch.float32: pa.float32(),
    torch.float16: pa.float16(),
    torch.bfloat16: pa.uint16(),  # Arrow has no bfloat16; the field's metadata says what the bits are
    torch.int64: pa.int64(),
    torch.int32: pa.int32(),
    torch.uint8: pa.uint8(),
}
DTYPES: Final = {name: getattr(torch, name) for name in COLUMN_DTYPES}


@dataclass(frozen=True, eq=False)
class RowBatch:
    """Rows of one shard in host memory, with all their columns, on the way to a row file or back."""

    first_row: int
    ids: Tensor | None
    """Row ids, int64 `[n]`, ascending without duplicates; None: contiguous from `first_row`."""
    columns: Mapping[str, Tensor]
    """`weights` and optimizer states by name, `[n]` or `[n, cols]`, on the CPU."""

    def __len__(self) -> int:
        return self.columns["weights"].shape[0]

    @property
    def last_row(self) -> int:
        """Row id of the last row."""
        return self.first_row + len(self) - 1 if self.ids is None else int(self.ids[-1])

    def fault(self, begin: int, end: int) -> str | None:
        """Why these rows, at least one, do not ascend within `begin` to before `end`; None if they do."""
        if self.ids is not None:
            if self.ids.dtype != torch.int64 or self.ids.shape != (len(self),):
                return f"{len(self)} int64 ids are needed, not {self.ids.dtype} {list(self.ids.shape)}"
            if self.ids[0] != self.first_row or not (self.ids[1:] > self.ids[:-1]).all():
                return f"their ids do not ascend from row {self.first_row} on"
        if self.first_row < begin or self.last_row >= end:
            return f"rows {self.first_row} to {self.last_row} are not all among {begin} to {end - 1}"
        return None


@dataclass(frozen=True)
class StoredColumn:
    """A column of a row file: its Arrow field, and the tensor that shares memory with it."""

    field: pa.Field
    dtype: torch.dtype
    width: int | None
    """Values in a row; None: one, in a plain column."""

    def to_arrow(self, stored: Tensor) -> pa.Array:
        """The tensor as an Arrow array that shares its memory."""
        values = pa.py_buffer(stored.detach().contiguous().flatten().view(torch.uint8).numpy())
        kind, num_rows = self.field.type, stored.shape[0]
        if not pa.types.is_fixed_size_list(kind):
            return pa.Array.from_buffers(kind, num_rows, [None, values])
        flat = pa.Array.from_buffers(kind.value_type, stored.numel(), [None, values])
        return pa.Array.from_buffers(kind, num_rows, [None], children=[flat])

    def from_arrow(self, array: pa.Array, memory: memoryview) -> Tensor:
        """The array as a tensor that shares `memory`, which the array must lie in.

        Raises:
            ValueError: the array has more or fewer bytes than its rows take in this column.
        """
        values = array.buffers()[-1]
        begin = values.address - pa.py_buffer(memory).address
        shape = (len(array),) if self.width is None else (len(array), self.width)
        count = torch.Size(shape).numel()
        if values.size != count * self.dtype.itemsize:
            raise ValueError(
                f"{self.field.name} has {values.size} bytes; {list(shape)} of {self.dtype} are other"
            )
        return torch.frombuffer(memory, dtype=self.dtype, count=count, offset=begin).view(shape)


def stored_columns(
    columns: Mapping[str, ColumnEntry], num_cols: int, codec: Codec
) -> dict[str, StoredColumn]:
    """Stored form of each column of a row file, by name and in the order of `columns`.

    Raises ValueError if a column has a data type that row files cannot hold.
    """
    stored = {}
    for name, column in columns.items():
        if column.dtype not in DTYPES:
            raise ValueError(f"column {name} is {column.dtype}; row files hold {', '.join(DTYPES)}")
        dtype, width = DTYPES[column.dtype], None if column.per_row else num_cols
        if name == WEIGHTS:
            dtype, width = codec.stored_as(dtype, num_cols)
        kind = _ARROW_TYPES[dtype]
        if width is not None:
            is_bytes = dtype == torch.uint8
            kind = pa.binary(width) if is_bytes else pa.list_(pa.field("item", kind, False), width)
        field = pa.field(name, kind, nullable=False, metadata={"dtype": column.dtype})
        stored[name] = StoredColumn(field, dtype, width)
    return stored


def schema_of(extent: Extent, columns: Mapping[str, StoredColumn], codec: Codec) -> pa.Schema:
    """Arrow schema of a shard's file; its metadata names the shard, for readers without the manifest."""
    metadata: dict[str, Any] = {
        "format": f"{FORMAT} {VERSION} rows",
        "table_fqn": extent.table_fqn,
        "table_rows": extent.table_shape[0],
        "table_cols": extent.table_shape[1],
        "row_offset": extent.row_offset,
        "num_rows": extent.num_rows,
        "col_offset": extent.col_offset,
        "num_cols": extent.num_cols,
        "codec": codec.name,
    }
    texts = {key: str(value) for key, value in metadata.items()}
    return pa.schema([column.field for column in columns.values()], metadata=texts)


__all__ = ["Extent", "RowBatch", "RowFileWriter", "decode_chunk", "read_chunk"]

_MAGIC_BYTES: Final = 8
"""Bytes before the schema in an Arrow file."""


class RowFileWriter:
    """Writes a file with rows of one shard and their optimizer state, chunk by chunk.

    `with_ids` says whether chosen rows are written, each with its id (a delta checkpoint), or all rows of the
    shard in order (a full checkpoint).

    Raises:
        ValueError: row files have no such codec, column name or data type.
    """

    def __init__(
        self,
        sink: Sink,
        *,
        shard: Extent,
        columns: Mapping[str, ColumnEntry],
        codec: str,
        with_ids: bool,
    ) -> None:
        if WEIGHTS not in columns or ROW in columns:
            raise ValueError(f"columns {', '.join(columns)}: one must be {WEIGHTS!r} and none {ROW!r}")
        self._shard = shard
        self._columns = dict(columns)
        self._with_ids = with_ids
        self._codec = codec_named(codec)
        entries = {ROW: ColumnEntry(dtype="int64", per_row=True)} if with_ids else {}
        self._entries = {**entries, WEIGHTS: columns[WEIGHTS], **columns}
        self._stored = stored_columns(self._entries, shard.num_cols, self._codec)
        self._schema = schema_of(shard, self._stored, self._codec)
        self._file = _ArrowSink(sink)
        self._arrow = pa.ipc.new_file(pa.PythonFile(self._file, mode="w"), self._schema)
        self._next_row = shard.row_offset
        self._max_error = 0.0
        self._chunks: list[ChunkEntry] = []

    def write(self, rows: RowBatch) -> None:
        """Append a chunk, unless there are no rows. The tensors may be reused as soon as this returns.

        Raises:
            ValueError: columns, shapes or data types differ from the table's; rows are outside the shard, not
                ascending, or have a gap where all rows are needed; the codec cannot hold a value.
            CheckpointError: the sink failed.
        """
        self._check_columns(rows)
        if not len(rows):
            return
        self._check_rows(rows)
        encoded = self._encode(rows)
        tensors = {**rows.columns, WEIGHTS: encoded}
        if rows.ids is not None:
            tensors[ROW] = rows.ids
        arrays = [column.to_arrow(tensors[name]) for name, column in self._stored.items()]
        # Arrow writes magic and schema with the first batch.
        begin = self._file.num_bytes or _MAGIC_BYTES + self._schema.serialize().size
        self._file.begin_chunk(begin)
        self._arrow.write_batch(pa.RecordBatch.from_arrays(arrays, schema=self._schema))
        self._chunks.append(
            ChunkEntry(
                offset=begin,
                length=self._file.num_bytes - begin,
                num_rows=len(rows),
                first_row=rows.first_row,
                last_row=rows.last_row,
                digest=self._file.chunk_digest(),
            )
        )
        self._next_row = rows.last_row + 1

    def finish(self, path: str, first_step: int, last_step: int) -> RowFileEntry:
        """Write the footer and return the file's entry for the manifest.

        Raises:
            ValueError: all rows of the shard were needed, and some are missing.
            CheckpointError: the sink failed.
        """
        end = self._shard.row_offset + self._shard.num_rows
        if not self._with_ids and self._next_row != end:
            raise ValueError(f"{path} lacks rows {self._next_row} to {end - 1} of {self._shard.table_fqn}")
        self._arrow.close()
        return RowFileEntry(
            **vars(self._shard),
            path=path,
            num_bytes=self._file.num_bytes,
            digest=self._file.digest(),
            columns=self._entries,
            codec=self._codec.name,
            max_error=self._max_error,
            first_step=first_step,
            last_step=last_step,
            chunks=tuple(self._chunks),
        )

    def _encode(self, rows: RowBatch) -> Tensor:
        try:
            stored, max_error = self._codec.encode(rows.columns[WEIGHTS])
        except ValueError as error:
            first, table = rows.first_row, self._shard.table_fqn
            raise ValueError(f"table {table}, rows from {first} on: {error}") from error
        self._max_error = max(self._max_error, max_error)
        return stored

    def _check_columns(self, rows: RowBatch) -> None:
        table = self._shard.table_fqn
        if set(rows.columns) != set(self._columns):
            wanted, given = ", ".join(sorted(self._columns)), ", ".join(sorted(rows.columns))
            raise ValueError(f"table {table} has columns {wanted}, not {given}")
        for name, column in self._columns.items():
            tensor, dtype = rows.columns[name], DTYPES[column.dtype]
            shape = (len(rows),) if column.per_row else (len(rows), self._shard.num_cols)
            if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != "cpu":
                raise ValueError(
                    f"column {name} of table {table} is {dtype} {list(shape)} on the CPU, "
                    f"not {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
                )

    def _check_rows(self, rows: RowBatch) -> None:
        if (rows.ids is not None) != self._with_ids:
            raise ValueError("a row save's rows have ids, a base's rows have none")
        fault = rows.fault(self._next_row, self._shard.row_offset + self._shard.num_rows)
        if not fault and rows.ids is None and rows.first_row != self._next_row:
            fault = f"they leave out row {self._next_row}"
        if fault:
            first, table = rows.first_row, self._shard.table_fqn
            raise ValueError(f"rows from {first} on cannot be written to a file of table {table}: {fault}")


def read_chunk(
    storage: Storage, folder: str, entry: RowFileEntry, chunk: ChunkEntry, buffer: memoryview | None = None
) -> RowBatch:
    """Read one chunk of a row file and verify its digest.

    The buffer is writable memory of at least `chunk.length` bytes, aligned to 8; None allocates it.

    Returns:
        Rows in the table's own dtype: views of `buffer`, except weights that had to be decoded.

    Raises:
        CorruptFileError: the chunk is missing, differs from its digest, or holds other rows than the manifest
            says.
    """
    buffer = np.empty(chunk.length, dtype=np.uint8).data if buffer is None else buffer
    assert buffer.nbytes >= chunk.length
    memory = buffer.cast("B")[: chunk.length]
    path = f"{folder}/{entry.path}"
    storage.read_into(path, chunk.offset, memory)
    return decode_chunk(f"{storage.uri}/{path}", entry, chunk, memory)


def decode_chunk(path: str, entry: RowFileEntry, chunk: ChunkEntry, memory: memoryview) -> RowBatch:
    """Verify and decode a chunk that was read from the file at `path`; raises as `read_chunk`."""
    rows = f"rows {chunk.first_row} to {chunk.last_row}"
    where = f"{path}: {rows}: their chunk at byte {chunk.offset}"
    found = digest(memory)
    if found != chunk.digest:
        raise CorruptFileError(
            f"{where} is damaged: its digest is {found}, the manifest says {chunk.digest}. "
            "Load an older state, and look at the storage"
        )
    try:
        return _decode(entry, chunk, memory)
    except DAMAGE as error:
        why = str(error) or type(error).__name__
        raise CorruptFileError(f"{where} is not what its manifest says: {why}") from error


def _decode(entry: RowFileEntry, chunk: ChunkEntry, memory: memoryview) -> RowBatch:
    codec = codec_named(entry.codec)
    stored = stored_columns(entry.columns, entry.num_cols, codec)
    schema = pa.schema([column.field for column in stored.values()])
    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(memory)), schema)
    batch.validate()
    columns = {name: column.from_arrow(batch.column(name), memory) for name, column in stored.items()}
    dtype = DTYPES[entry.columns[WEIGHTS].dtype]
    columns[WEIGHTS] = codec.decode(columns[WEIGHTS], dtype, entry.num_cols)
    ids = columns.pop(ROW, None)
    rows = RowBatch(chunk.first_row, ids, columns)
    if fault := rows.fault(entry.row_offset, entry.row_offset + entry.num_rows):
        raise ValueError(fault)
    if (len(rows), rows.last_row) != (chunk.num_rows, chunk.last_row):
        raise ValueError(f"it holds {len(rows)} rows, the last of them {rows.last_row}")
    return rows


class _ArrowSink(HashingSink):
    """Computes the digest of each chunk, too."""

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self.begin_chunk(0)

    def begin_chunk(self, offset: int) -> None:
        """Begin the next chunk at this offset of the file."""
        self._chunk_begin = offset
        self._chunk = xxhash.xxh3_128()

    def chunk_digest(self) -> str:
        """XXH3-128 of the chunk so far."""
        return self._chunk.hexdigest()

    def write(self, data: Any) -> None:
        """Append bytes."""
        super().write(data)
        if self.num_bytes > self._chunk_begin:
            self._chunk.update(data)
