"""Rows in memory, their columns in Arrow, and the conversion between tensors and Arrow without a copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import torch
from torch import Tensor

from cpr.checkpoint.format.codecs import Codec
from cpr.checkpoint.format.manifest import COLUMN_DTYPES, FORMAT, VERSION, WEIGHTS, ColumnEntry
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
