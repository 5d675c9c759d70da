"""Writes the tables of a model as Parquet, for SQL and data frames.

Each table is a folder with columns `row`, `weights` (a list of numbers) and the optimizer states.
Half-precision values are widened to float32, which holds them exactly; integers, such as the ids of a dynamic
table, are unchanged. Only tables are written.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cpr.checkpoint.format.manifest import ROW, WEIGHTS
from cpr.checkpoint.interop.full_model import FullModel, TableColumn

FILE_WINDOWS: Final = 16
"""Windows in a file, each a row group: about 1 GiB per file."""
ROW_FIELD: Final = pa.field(ROW, pa.int64(), nullable=False)
_WIDENED: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Data types that many readers of Parquet lack, and the types that are written instead."""


def write_parquet(model: FullModel, folder: Path, progress: Callable[[int], object]) -> None:
    """Write all tables."""
    for table_fqn, columns in model.tables.items():
        schema = pa.schema([ROW_FIELD, *map(field_of, columns)])
        write_parts(folder / table_fqn, schema, _windows(model, table_fqn, schema, progress))


def _windows(
    model: FullModel, table_fqn: str, schema: pa.Schema, progress: Callable[[int], object]
) -> Iterator[pa.Table]:
    for first_row in model.starts(table_fqn):
        window = model.window(table_fqn, first_row)
        rows = torch.arange(first_row, first_row + len(window[WEIGHTS]))
        yield as_table({ROW: rows, **window}, schema)
        progress(sum(values.nbytes for values in window.values()))


def write_parts(folder: Path, schema: pa.Schema, groups: Iterable[pa.Table]) -> None:
    """Write row groups to a new folder of Parquet files; one file without rows if there are none."""
    folder.mkdir(parents=True)
    groups = iter(groups)
    group = next(groups, schema.empty_table())
    for number in count():
        with _writer(folder / f"part-{number:05d}.parquet", schema) as writer:
            writer.write_table(group)
            for more in islice(groups, FILE_WINDOWS - 1):
                writer.write_table(more)
        group = next(groups, None)
        if group is None:
            return


def field_of(column: TableColumn) -> pa.Field:
    """The Parquet column of a table's column."""
    value = pa.from_numpy_dtype(_widen(torch.empty(0, dtype=column.dtype)).numpy().dtype)
    if column.shape[1:]:
        value = pa.list_(pa.field("element", value, nullable=False), column.shape[1])
    return pa.field(column.name, value, nullable=False)


def as_table(columns: Mapping[str, Tensor], schema: pa.Schema) -> pa.Table:
    """Columns by name, `[n, ...]` each, as a row group; those that the schema lacks are left out."""
    arrays = []
    for field in schema:
        values = pa.array(_widen(columns[field.name]).reshape(-1).numpy())
        if pa.types.is_fixed_size_list(field.type):
            values = pa.FixedSizeListArray.from_arrays(values, type=field.type)
        arrays.append(values)
    return pa.Table.from_arrays(arrays, schema=schema)


def _widen(values: Tensor) -> Tensor:
    return values.to(_WIDENED.get(values.dtype, values.dtype))


@contextmanager
def _writer(path: Path, schema: pa.Schema) -> Iterator[Any]:
    with path.open("wb") as file:
        # Trained weights hardly compress, so dictionaries and compression are not worth their time.
        with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
            yield writer
        file.flush()
        os.fsync(file.fileno())
