"""Converts a span of a raw file to Parquet, in a worker process.

Row groups have exactly `ROW_GROUP_ROWS` rows, except the last one of a file, whatever the size of the blocks.
The bytes of the output thus depend on the input and the configuration alone, not on processes, memory or
interruptions.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import polars as pl

from data.jobs.files import durable_file
from data.jobs.location import Location
from data.prepare.parse.ids import IdRule, to_samples
from data.prepare.parse.walk import SpanTask
from data.prepare.pieces import Written

ROW_GROUP_ROWS: Final = 65_536
"""Rows in a row group."""
COMPRESSION: Final = "lz4"
"""Of Parquet pages: read faster than zstd here, for some more bytes."""


@dataclass(frozen=True, kw_only=True)
class ConvertSpan(SpanTask):
    """Task that converts the unfinished pieces of a span."""

    out: Location
    """Folder of the data set."""
    rule: IdRule
    """How categories become ids."""

    def write(self, name: str, frames: Iterator[pl.DataFrame]) -> Written:
        """Write the piece's Parquet file, if it has a good line."""
        converted = [to_samples(frame, self.rule) for frame in frames]
        samples = pl.concat(converted, rechunk=False) if converted else pl.DataFrame()
        if not samples.height:
            return Written()
        with durable_file(part_path(self.out, name)) as sink:
            samples.write_parquet(
                sink,  # type: ignore[arg-type]  # polars accepts any object with these methods
                compression=COMPRESSION,
                statistics=False,
                row_group_size=ROW_GROUP_ROWS,
            )
        whole, rest = divmod(samples.height, ROW_GROUP_ROWS)
        row_groups = (ROW_GROUP_ROWS,) * whole + ((rest,) if rest else ())
        return Written(row_groups=row_groups, num_bytes=sink.num_bytes, sha256=sink.sha256)


def part_path(out: Location, piece_name: str) -> Location:
    """Location of the Parquet file of a piece."""
    return out / f"{piece_name}.parquet"
