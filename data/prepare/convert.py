"""One span of a raw file to Parquet: what a worker process does in the converting pass.

Rows are written in row groups of exactly `ROW_GROUP_ROWS`, but for the last of a file, whatever the
size of the blocks they were read in. So the bytes of the output depend on the input and the
configuration alone, not on processes, memory or where a job was interrupted.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from data.criteo import CATEGORY_NAMES, DENSE_NAMES, LABEL
from data.prepare.ids import IdRule, to_samples
from data.prepare.inputs import Span
from data.prepare.pieces import PieceRecord, Written, durable_file
from data.prepare.progress import Report
from data.prepare.walk import Piece, read_pieces

ROW_GROUP_ROWS: Final = 65_536
"""Rows in a row group."""
COMPRESSION: Final = "lz4"
"""Of Parquet pages: read nearly twice as fast as zstd here, for a fifth more bytes."""
DICTIONARY_TABLE_ROWS: Final = 65_536
"""Ids of tables up to this size are dictionary-encoded; with more distinct ids a dictionary only costs."""

SCHEMA: Final = pa.schema(
    [
        pa.field(LABEL, pa.uint8()),
        *(pa.field(name, pa.float32()) for name in DENSE_NAMES),
        *(pa.field(name, pa.int32()) for name in CATEGORY_NAMES),
    ]
)


@dataclass(frozen=True, kw_only=True)
class ConvertSpan:
    """A task: write the pieces of a span, but for those that are finished."""

    span: Span
    """What to read."""
    finished: tuple[PieceRecord, ...]
    """Finished pieces of the span."""
    out: Path
    """Folder of the data set."""
    records: Path
    """Folder of this pass's records."""
    rule: IdRule
    """How categories become ids."""
    table_rows: tuple[int, ...]
    """Rows of the tables."""
    block_bytes: int
    """Raw text parsed at once."""

    def run(self, report: Report) -> None:
        """Do it."""
        for piece in read_pieces(self.span, self.finished, self.block_bytes, report):
            with piece.rejects_into(self.records):
                written = self._write(piece)
            piece.record(written).write(self.records)

    def _write(self, piece: Piece) -> Written:
        """Write the piece's Parquet file, if it has a good line."""
        groups = _row_groups(to_samples(frame, self.rule).to_arrow() for frame in piece.frames())
        first = next(groups, None)
        if first is None:
            return Written()
        rows = []
        with (
            durable_file(self.out / f"{piece.name}.parquet") as sink,
            pq.ParquetWriter(
                pa.PythonFile(sink, mode="w"),
                SCHEMA,
                compression=COMPRESSION,
                use_dictionary=self._dictionary_columns(),
                write_statistics=False,
            ) as writer,
        ):
            for group in itertools.chain([first], groups):
                writer.write_table(group, row_group_size=ROW_GROUP_ROWS)
                rows.append(group.num_rows)
        return Written(row_groups=tuple(rows), num_bytes=sink.num_bytes, sha256=sink.sha256)

    def _dictionary_columns(self) -> list[str]:
        tables = zip(CATEGORY_NAMES, self.table_rows, strict=True)
        return [LABEL, *DENSE_NAMES, *(name for name, rows in tables if rows <= DICTIONARY_TABLE_ROWS)]


def _row_groups(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The same rows in tables of `ROW_GROUP_ROWS`, the last one shorter."""
    pending = SCHEMA.empty_table()
    for table in tables:
        pending = pa.concat_tables([pending, table.cast(SCHEMA)])
        while pending.num_rows >= ROW_GROUP_ROWS:
            yield pending.slice(0, ROW_GROUP_ROWS)
            pending = pending.slice(ROW_GROUP_ROWS)
    if pending.num_rows:
        yield pending
