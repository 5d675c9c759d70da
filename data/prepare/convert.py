"""Converts a span of a raw file to Parquet, in a worker process.

Row groups have exactly `ROW_GROUP_ROWS` rows, except the last one of a file, whatever the size of the blocks.
The bytes of the output thus depend on the input and the configuration alone, not on processes, memory or
interruptions.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import polars as pl

from data.prepare.parse.ids import IdRule, to_samples
from data.prepare.parse.inputs import Span
from data.prepare.parse.walk import Piece, read_pieces
from data.prepare.pieces import PieceRecord, Written, durable_file, stored_bytes
from data.prepare.progress import Report

ROW_GROUP_ROWS: Final = 65_536
"""Rows in a row group."""
COMPRESSION: Final = "lz4"
"""Of Parquet pages: read faster than zstd here, for some more bytes."""


@dataclass(frozen=True, kw_only=True)
class ConvertSpan:
    """Task that writes the unfinished pieces of a span."""

    span: Span
    """Part of a raw file."""
    finished: tuple[PieceRecord, ...]
    """Finished pieces of the span."""
    out: Path
    """Folder of the data set."""
    records: Path
    """Folder of this pass's records."""
    rule: IdRule
    """How categories become ids."""
    block_bytes: int
    """Raw text parsed at once."""

    def run(self, report: Report) -> None:
        """Convert the pieces."""
        for piece in read_pieces(self.span, self.finished, self.block_bytes, report):
            with piece.rejects_into(self.records):
                written = self._write(piece)
            piece.record(written).write(self.records)

    def _write(self, piece: Piece) -> Written:
        """Write the piece's Parquet file, if it has a good line."""
        frames = [to_samples(frame, self.rule) for frame in piece.frames()]
        samples = pl.concat(frames, rechunk=False) if frames else pl.DataFrame()
        if not samples.height:
            return Written()
        with durable_file(part_path(self.out, piece.name)) as sink:
            samples.write_parquet(
                sink,  # type: ignore[arg-type]  # polars accepts any object with these methods
                compression=COMPRESSION,
                statistics=False,
                row_group_size=ROW_GROUP_ROWS,
            )
        whole, rest = divmod(samples.height, ROW_GROUP_ROWS)
        row_groups = (ROW_GROUP_ROWS,) * whole + ((rest,) if rest else ())
        return Written(row_groups=row_groups, num_bytes=sink.num_bytes, sha256=sink.sha256)


def part_path(out: Path, piece_name: str) -> Path:
    """Path of the Parquet file of a piece."""
    return out / f"{piece_name}.parquet"


def part_is_there(out: Path, record: PieceRecord) -> bool:
    """Whether the Parquet file of a finished piece, if any, exists with its size."""
    return not record.row_groups or stored_bytes([part_path(out, record.name)]) == record.num_bytes
