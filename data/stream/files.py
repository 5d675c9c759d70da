"""Reads the files of a stream, unit by unit."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.convert.read.files import format_of, input_file
from data.jobs.location import Location
from data.stream.records import RecordReader, criteo_rows
from data.stream.source import Checked, Place
from data.stream.units import Unit
from data.text.content import open_content
from data.text.streams import LineReader

PIECE_RECORDS: Final = 4096
"""Records of a row group that belong to one partition."""
BLOCK_BYTES: Final = 1 << 18
FEWER: Final = "it has fewer records than were found in it"
CRITEO: Final = "criteo"
"""Format of files without a known ending, where the data set was made of Criteo's logs."""


class GoneError(Exception):
    """A file is not what it was when it was found."""


class Piece(NamedTuple):
    """Records of a file that belong to one unit."""

    group: int
    """Row group."""
    begin: int
    """First row in the row group."""
    num_records: int


class _Block(NamedTuple):
    """Consecutive records of a file that is no Parquet."""

    frame: pl.DataFrame
    records: NDArray[np.int64]
    """Numbers of the frame's rows, from 0."""
    end: int
    """Number of the record after the block."""
    bad: Mapping[int, str]


class FileReader:
    """Reads the files of a folder: Parquet, CSV, TSV, JSON lines, or one of Criteo's logs.

    Args:
        folder: with the files.
        records: decodes their rows.
        is_criteo: whether files without a known ending are Criteo's logs.
    """

    def __init__(self, folder: Location, records: RecordReader, *, is_criteo: bool) -> None:
        self._folder, self._records, self._is_criteo = folder, records, is_criteo
        self._table: tuple[str, pa.Table] | None = None
        self._text: tuple[Place, Iterator[_Block]] | None = None

    def pieces(self, path: str) -> Iterator[Piece]:
        """The pieces of a file, in order.

        Raises:
            ValueError, OSError, pyarrow.ArrowException, polars.exceptions.PolarsError: it cannot be read.
        """
        kind = self._format(path)
        if self._records.is_encoded and kind != "parquet":
            raise ValueError(f"encoded records (stream.rows) come as Parquet, and this is {kind}")
        if kind != "parquet":
            *_, num_records = [0, *(block.end for block in self._blocks(path, 0))]
            yield Piece(0, 0, num_records)
            return
        with (self._folder / path).open() as stream:
            metadata = pq.ParquetFile(stream).metadata
        for group in range(metadata.num_row_groups):
            num_rows = metadata.row_group(group).num_rows
            for begin in range(0, num_rows, PIECE_RECORDS):
                yield Piece(group, begin, min(PIECE_RECORDS, num_rows - begin))

    def read(self, place: Place, end: int) -> tuple[Checked, int]:
        """Read records of a unit from `place` up to about the record `end`.

        Returns:
            The records, and the number of the record after them.

        Raises:
            GoneError: the file has been replaced or deleted.
            ValueError, OSError, pyarrow.ArrowException, polars.exceptions.PolarsError: it cannot be read.
        """
        _, path, group, first = Unit.of(place.unit)
        name = str(self._folder / path)
        if self._format(path) != "parquet":
            block = self._next_block(place, path)
            if self.is_gone(place.unit):
                raise GoneError
            checked = self._records.of_frame(block.frame, block.records, name)
            return replace(checked, bad={**block.bad, **checked.bad}), block.end
        table = self._group(place.unit, path, group)[first + place.record : first + end]
        if len(table) < end - place.record:  # it was replaced by another one that has the same time
            raise ValueError(FEWER)
        records = np.arange(place.record, end)
        if self._records.is_encoded:
            return self._records.of_table(table, records, name), end
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return self._records.of_frame(frame, records, name), end

    def is_gone(self, unit: str) -> bool:
        """Whether a unit's file is no more what was found.

        Under the same name there may be another one, whose records come with its own units.
        """
        written_ns, path, *_ = Unit.of(unit)
        try:
            (info,) = self._folder.filesystem.get_file_info([(self._folder / path).path])
        except OSError:
            return False
        return not info.is_file or self._time(info.mtime_ns) != self._time(written_ns)

    def _time(self, nanoseconds: int) -> int:
        """A time to compare: some stores tell fractions of seconds only where they list many files."""
        return nanoseconds if self._folder.local is not None else nanoseconds // 10**9

    def close(self) -> None:
        """Close the file that is being read."""
        self._table = self._text = None

    def _format(self, path: str) -> str:
        """Format of a file, by its name."""
        try:
            return format_of(self._folder / path)
        except ValueError:
            if not self._is_criteo:
                raise
            return CRITEO

    def _group(self, unit: str, path: str, group: int) -> pa.Table:
        """A row group, of which this rank reads all its pieces before the next one."""
        key = unit.rpartition("+")[0]
        if self._table is None or self._table[0] != key:
            self._table = None
            with (self._folder / path).open() as stream:
                table = pq.ParquetFile(stream, page_checksum_verification=True).read_row_group(group)
            if self.is_gone(unit):
                raise GoneError
            self._table = key, table
        return self._table[1]

    def _next_block(self, place: Place, path: str) -> _Block:
        """The block of a file that begins at `place`; reading continues where the one before has ended."""
        text, self._text = self._text, None  # after an error, it cannot continue
        blocks = text[1] if text is not None and text[0] == place else self._blocks(path, place.record)
        block = next(blocks, None)
        if block is None:
            raise ValueError(FEWER)
        self._text = Place(place.unit, block.end), blocks
        return block

    def _blocks(self, path: str, skipped: int) -> Iterator[_Block]:
        """Records of a file after the first `skipped` ones."""
        place = self._folder / path
        if self._format(path) == CRITEO:
            yield from _criteo_blocks(place, skipped)
            return
        file = input_file(place, path, self._records.columns)
        for block in file.blocks(self._records.columns, skipped, BLOCK_BYTES):
            bad = {each.row - 1: each.reason for each in block.bad}
            end = 1 + max([*(block.rows - 1)[-1:].tolist(), *bad])
            yield _Block(block.frame, block.rows - 1, end, bad)


def _criteo_blocks(place: Location, skipped: int) -> Iterator[_Block]:
    """Lines of one of Criteo's logs after the first `skipped` ones."""
    with closing(open_content(place, [0])) as content:
        number = 0
        for text in LineReader(content, 0, BLOCK_BYTES).blocks(lambda: None):
            frame, bad_lines = criteo_rows(text)
            bad = {number + line.index: line.reason for line in bad_lines}
            num_lines = frame.height + len(bad)
            records = np.delete(np.arange(number, number + num_lines), [each - number for each in bad])
            number += num_lines
            if number <= skipped:
                continue
            left = records >= skipped
            bad = {each: reason for each, reason in bad.items() if each >= skipped}
            yield _Block(frame.filter(pl.Series(left)), records[left], number, bad)
