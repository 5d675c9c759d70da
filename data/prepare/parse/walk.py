"""Reads the pieces of a span in order, as typed columns, for both passes.

A piece counts its lines, stores bad ones, reports progress, and finally makes its record. `convert` and
`vocabulary` have the task of a pass each.
"""

import io
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Final

import polars as pl

from data.jobs.files import durable_file
from data.jobs.location import Location
from data.prepare.parse.columns import read_block
from data.prepare.parse.inputs import PIECE_BYTES, RawFile, Span
from data.prepare.parse.lines import TRAILING_BYTES, TRUNCATED, BadLine
from data.prepare.pieces import PieceRecord, Progress, Report, Written, piece_name, record_path
from data.text.content import Content, open_content
from data.text.streams import LineReader

REJECTS_SUFFIX: Final = ".rejects.jsonl"
REJECT_TEXT_BYTES: Final = 4096
"""Stored bytes of a bad line."""


BlockReport = Callable[[int, int, int], object]


class Piece:
    """The lines of one piece; made by `read_pieces`.

    Args:
        raw: the file.
        reader: stands at the first line.
        day: day of the piece.
        index: position in the day.
        limit: byte of the text before which the piece's lines start; None as long as it is not known.
        report: called after every block with stored bytes read, and the lines and bad lines of the block.
    """

    def __init__(
        self,
        raw: RawFile,
        reader: LineReader,
        *,
        day: int,
        index: int,
        limit: Callable[[], int | None],
        report: BlockReport,
    ) -> None:
        self.name = piece_name(day, index)
        self._raw, self._reader, self._day, self._index = raw, reader, day, index
        self._limit, self._report = limit, report
        self._start = reader.offset
        self._num_lines = 0
        self._num_rejects: Counter[str] = Counter()

    def frames(self, rejects: io.RawIOBase | io.BytesIO) -> Iterator[pl.DataFrame]:
        """The good lines, in parts, as `read_block` gives them; bad ones are written to `rejects`."""
        for block in self._reader.blocks(self._limit):
            for frame, bad in read_block(block):
                self._count(frame.height, bad, rejects)
                if frame.height:
                    yield frame
        if not self._reader.exhausted:
            return
        content = self._reader.content
        if content.damage:
            self._count(0, [BadLine(0, TRUNCATED, self._reader.partial)], rejects)
        if content.trailing:
            self._count(0, [BadLine(0, TRAILING_BYTES, content.trailing)], rejects)

    def record(self, written: Written) -> PieceRecord:
        """The record of the piece, once its lines have been read and its files are written."""
        return PieceRecord(
            **vars(written),
            name=self.name,
            raw_name=self._raw.path.name,
            day=self._day,
            index=self._index,
            start=self._start,
            end=self._reader.offset,
            last=self._reader.exhausted,
            num_lines=self._num_lines,
            num_rejects=dict(self._num_rejects),
        )

    def _count(self, num_good: int, bad: Sequence[BadLine], rejects: io.RawIOBase | io.BytesIO) -> None:
        for line in bad:
            self._num_rejects[line.reason] += 1
            rejects.write(_reject_line(self._raw.path.name, self._num_lines + line.index, line))
        num_lines = num_good + len(bad)
        self._num_lines += num_lines
        self._report(self._reader.content.stored_position, num_lines, len(bad))


@dataclass(frozen=True, kw_only=True)
class SpanTask(ABC):
    """Task that does the unfinished pieces of a span."""

    span: Span
    """Part of a raw file."""
    finished: tuple[PieceRecord, ...]
    """Finished pieces of the span."""
    records: Location
    """Folder of this pass's records."""
    block_bytes: int
    """Raw text parsed at once."""

    def run(self, report: Report) -> None:
        """Read and commit the pieces."""
        for piece in read_pieces(self.span, self.finished, self.block_bytes, report):
            with durable_file(record_path(self.records, piece.name, REJECTS_SUFFIX)) as rejects:
                written = self.write(piece.name, piece.frames(rejects))
            piece.record(written).write(self.records)

    @abstractmethod
    def write(self, name: str, frames: Iterator[pl.DataFrame]) -> Written:
        """Write the files of a piece.

        Args:
            name: of the piece.
            frames: its good lines.
        """


def read_pieces(
    span: Span, finished: Sequence[PieceRecord], block_bytes: int, report: Report
) -> Iterator[Piece]:
    """Yield the unfinished pieces of a span; each must be read before the next one is requested.

    Args:
        span: part of a raw file.
        finished: records of finished pieces of the span.
        block_bytes: raw text parsed at once.
        report: called after every block.
    """
    if any(record.last for record in finished) or (finished and span.end is not None):
        return
    make = _piece_of_range if span.end is not None else _pieces_of_stream
    add = partial(_report_sums, report, Counter())
    with closing(open_content(span.raw.path, span.raw.day_starts)) as content:
        yield from make(span, finished, content, block_bytes, add)


def _piece_of_range(
    span: Span, finished: Sequence[PieceRecord], content: Content, block_bytes: int, report: BlockReport
) -> Iterator[Piece]:
    # start one byte early: if that byte ends a line, the line at `start` belongs to this piece
    early = max(span.start - 1, 0)
    content.skip_to(early)
    reader = LineReader(content, early, block_bytes)
    if span.start:
        reader.skip_partial_line()
    yield Piece(span.raw, reader, day=span.day, index=span.index, limit=lambda: span.end, report=report)


def _pieces_of_stream(
    span: Span, finished: Sequence[PieceRecord], content: Content, block_bytes: int, report: BlockReport
) -> Iterator[Piece]:
    offset = max((record.end for record in finished), default=0)
    content.skip_to(offset)
    reader = LineReader(content, offset, block_bytes)
    num_pieces = Counter(record.day for record in finished)
    while not reader.exhausted:
        start, day = reader.offset, span.raw.first_day + reader.day

        def limit(start: int = start) -> int:
            day_end = reader.day_end(start)
            return min(start + PIECE_BYTES, day_end if day_end is not None else start + PIECE_BYTES)

        yield Piece(span.raw, reader, day=day, index=num_pieces[day], limit=limit, report=report)
        num_pieces[day] += 1


def _report_sums(
    report: Report, sums: Counter[str], stored_position: int, num_lines: int, num_bad: int
) -> None:
    sums.update(num_lines=num_lines, num_bad=num_bad)
    report(Progress(stored_position=stored_position, num_lines=sums["num_lines"], num_bad=sums["num_bad"]))


def _reject_line(raw_name: str, index: int, bad: BadLine) -> bytes:
    text = bad.text[:REJECT_TEXT_BYTES].decode(errors="backslashreplace")
    fields = {"file": raw_name, "line": index + 1, "reason": bad.reason, "text": text}
    return json.dumps(fields, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
