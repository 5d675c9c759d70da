"""Reads Parquet files of any writer in batches of bounded size, from any row on."""

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from data.convert.read.blocks import Block
from data.jobs.location import Location

_BUFFER_BYTES: Final = 1 << 20
"""Bytes of a column that are read at once."""
_MAX_ROWS: Final = 1 << 16
_PROBE_ROWS: Final = 256


class ParquetReader:
    """Rows of a Parquet file.

    Args:
        path: the file.
        columns: names to read.
    """

    def __init__(self, path: Location, columns: Sequence[str]) -> None:
        self._stream = path.open()
        try:
            self._file = pq.ParquetFile(self._stream, buffer_size=_BUFFER_BYTES, pre_buffer=False)
        except (pa.ArrowException, OSError) as error:
            self._stream.close()
            raise ValueError(f"{path} is no Parquet file, or a damaged one ({error})") from error
        self._path, self._columns = path, list(columns)
        self.names = list(self._file.schema_arrow.names)
        """Names of all columns."""

    def blocks(self, skipped: int, block_bytes: int) -> Iterator[Block]:
        """Rows after the first `skipped` ones."""
        metadata = self._file.metadata
        sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
        ends = np.cumsum(sizes)
        start = int(np.searchsorted(ends, skipped, side="right"))
        number = int(ends[start - 1]) if start else 0
        groups = list(range(start, len(sizes)))
        if not groups:
            return
        batch_rows = max(1, min(_MAX_ROWS, int(block_bytes // self._row_bytes(groups[0]))))
        total, num_bytes = max(metadata.num_rows, 1), self._path.size() or 0
        try:
            for batch in self._file.iter_batches(
                batch_rows, row_groups=groups, columns=self._columns, use_threads=False
            ):
                first, number = number + 1, number + batch.num_rows
                if number <= skipped:
                    continue
                frame = pl.from_arrow(pa.Table.from_batches([batch]).select(self._columns))
                assert isinstance(frame, pl.DataFrame)
                position = num_bytes * number // total
                yield Block(frame, np.arange(first, number + 1), batch.num_rows, position)
        except (pa.ArrowException, OSError, pl.exceptions.PolarsError) as error:
            raise ValueError(f"{self._path} cannot be read after row {number} ({error})") from error

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _row_bytes(self, group: int) -> float:
        """Decoded bytes of a row: the mean of a few, or what the writer counted, which may be encoded."""
        batches = self._file.iter_batches(
            _PROBE_ROWS, row_groups=[group], columns=self._columns, use_threads=False
        )
        found = next((float(batch.nbytes) / batch.num_rows for batch in batches if batch.num_rows), 0.0)
        counted = self._file.metadata.row_group(group)
        row_bytes: float = counted.total_byte_size / max(counted.num_rows, 1)
        return max(found, row_bytes, 1.0)
