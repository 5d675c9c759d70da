"""Writes the tables of a model as Parquet, for SQL and data frames.

Each table is a folder with columns `row`, `weights` (a list of numbers) and the optimizer states.
Half-precision values are widened to float32, which holds them exactly; integers, such as the ids of a dynamic
table, are unchanged. Only tables are written.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from cpr.checkpoint.interop.full_model import FullModel, TableColumn

FILE_WINDOWS: Final = 16
"""Windows in a file, each a row group: about 1 GiB per file."""
_WIDENED: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
"""Data types that many readers of Parquet lack, and the types that are written instead."""


def write_parquet(model: FullModel, folder: Path, progress: Callable[[int], object]) -> None:
    """Write all tables."""
    for table_fqn, columns in model.tables.items():
        (folder / table_fqn).mkdir()
        schema = _schema(columns)
        starts = model.starts(table_fqn)
        for at in range(0, max(1, len(starts)), FILE_WINDOWS):
            path = folder / table_fqn / f"part-{at // FILE_WINDOWS:05d}.parquet"
            with _writer(path, schema) as writer:
                for first_row in starts[at : at + FILE_WINDOWS]:
                    window = model.window(table_fqn, first_row)
                    writer.write_table(_rows(window, first_row, schema))
                    progress(sum(rows.nbytes for rows in window.values()))


def _schema(columns: Sequence[TableColumn]) -> pa.Schema:
    fields = [pa.field("row", pa.int64(), nullable=False)]
    for column in columns:
        value = pa.from_numpy_dtype(_widen(torch.empty(0, dtype=column.dtype)).numpy().dtype)
        if column.shape[1:]:
            value = pa.list_(pa.field("element", value, nullable=False), column.shape[1])
        fields.append(pa.field(column.name, value, nullable=False))
    return pa.schema(fields)


def _rows(window: dict[str, Tensor], first_row: int, schema: pa.Schema) -> pa.Table:
    arrays = [pa.array(np.arange(first_row, first_row + len(window["weights"])))]
    for field in list(schema)[1:]:
        values = pa.array(_widen(window[field.name]).reshape(-1).numpy())
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
