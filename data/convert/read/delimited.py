"""Reads CSV and TSV: polars for usual blocks, Python's csv module for those with mistakes.

The grammar is RFC 4180: a field may be quoted, and then hold separators, line ends, and quotes as two.
polars is lenient with quotes and other numbers of fields, so that its result is used only if all quotes are
where the grammar has them, and the numbers of separators and line ends agree. A record that is no row ends
with its first line, so that a quote that is never closed loses one line and not the rest of the file.
"""

import csv
import io
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import polars as pl
from numpy.typing import NDArray

from data.convert.read.blocks import BadRow, Block, numbered
from data.text.streams import MAX_LINE_BYTES, LineReader

SEPARATORS: Final = {"csv": ",", "tsv": "\t"}
_TEXT_LENGTH: Final = 4096
"""Characters of a bad record that are kept."""
_SLICE_BYTES: Final = 64 << 10
_BAD_QUOTE: Final = "a quote is not closed, or text follows one"


class DelimitedReader:
    """Records of a CSV or TSV file.

    Args:
        lines: the file, at its start.
        separator: between fields.
        columns: names to read; an empty sequence reads all.
    """

    def __init__(self, lines: LineReader, separator: str, columns: Sequence[str]) -> None:
        csv.field_size_limit(MAX_LINE_BYTES)
        self._lines, self._separator = lines, separator
        self._blocks = lines.blocks(lambda: None)
        self._left = b""
        header, self._rest = self._read_header()
        self.names = header
        """Names of all columns, as they are in the header."""
        self._wanted = list(columns or header)
        self._positions = [header.index(name) for name in self._wanted if name in header]

    def blocks(self) -> Iterator[Block]:
        """All records after the header."""
        first = 1
        for text, last in self._texts():
            block = self._fast(text, first)
            for made in [block] if block else self._slow(text, first, last):
                first += made.num_records
                yield made

    def _texts(self) -> Iterator[tuple[bytes, bool]]:
        """The text in whole lines, and whether it ends."""
        waiting = self._rest
        for block in self._blocks:
            if waiting:
                yield waiting, False
            waiting = block
        yield waiting, True

    def _read_header(self) -> tuple[list[str], bytes]:
        text = next(self._blocks, b"")
        head = text[:MAX_LINE_BYTES].decode(errors="surrogateescape")
        lines = io.StringIO(head, newline="")
        try:
            names = next(csv.reader(lines, delimiter=self._separator, strict=True), [])
        except csv.Error as error:
            raise ValueError(f"its header cannot be read ({error})") from error
        size = len(head[: lines.tell()].encode(errors="surrogateescape"))
        return names, text[size:]

    def _fast(self, text: bytes, first: int) -> Block | None:
        """The block by polars, or None if it may not be all rows."""
        if self._left or len(self.names) == 1:  # in which an empty line looks like a record
            return None
        quoted = b'"' in text
        text = text.replace(b"\r\n", b"\n") if b"\r" in text and not quoted else text
        codes = np.frombuffer(text, np.uint8)
        if quoted:
            outside = _outside_quotes(codes, self._separator)
            if outside is None:
                return None
            codes = outside
        num_lines, num_separators = (
            int(np.count_nonzero(codes == byte)) for byte in (ord("\n"), ord(self._separator))
        )
        if num_separators != (len(self.names) - 1) * num_lines or b"\r" in text or not num_lines:
            return None
        try:
            frame = pl.read_csv(
                text,
                has_header=False,
                separator=self._separator,
                quote_char='"' if quoted else None,
                schema={str(position): pl.String for position in range(len(self.names))},
                columns=sorted(self._positions),
                empty_string_is_null=False,
            )
        except pl.exceptions.PolarsError:
            return None
        if frame.height != num_lines:
            return None
        made = frame.select(
            pl.col(str(position)).alias(name)
            for name, position in zip(self._wanted, self._positions, strict=True)
        )
        return Block(made, numbered(first, num_lines, []), num_lines, self._position)

    def _slow(self, text: bytes, first: int, last: bool) -> Iterator[Block]:
        """The block by Python, in slices, as Python needs much memory for a field."""
        start = 0
        while start < len(text) or (last and self._left):
            end = text.find(b"\n", start + _SLICE_BYTES) + 1 or len(text)
            block = self._records(self._left + text[start:end], first, last and end == len(text))
            if block.num_records:
                yield block
            first, start = first + block.num_records, end

    def _records(self, text: bytes, first: int, last: bool) -> Block:
        records: list[list[str]] = []
        bad: list[BadRow] = []
        lines = _Lines(text)
        number, left = first, ""
        while lines:
            lines.begin()
            try:
                fields = next(csv.reader(lines, delimiter=self._separator, strict=True))
                reason = self._judge(fields)
            except (csv.Error, OverflowError) as error:
                if not last and "end of data" in str(error):
                    left = lines.taken  # the record may end in the next block
                    break
                fields, reason = [], "longer than 1 MiB" if "larger" in str(error) else _BAD_QUOTE
                lines.keep_first()
            if reason:
                shown = lines.taken.rstrip("\r\n")[:_TEXT_LENGTH]
                bad.append(BadRow(number, reason, shown.encode(errors="backslashreplace").decode()))
            elif fields:
                records.append([fields[position] for position in self._positions])
            number += bool(fields or reason)
        self._left = left.encode(errors="surrogateescape")
        columns = zip(*records, strict=True) if records else [[] for _ in self._wanted]
        frame = pl.DataFrame(
            [
                pl.Series(name, list(column), pl.String)
                for name, column in zip(self._wanted, columns, strict=True)
            ]
        )
        return Block(frame, numbered(first, len(records), bad), number - first, self._position, bad)

    def _judge(self, fields: list[str]) -> str:
        """Reason to refuse a record; empty if it is a row, or an empty line."""
        if not fields:
            return ""
        if len(fields) != len(self.names):
            return "another number of fields than the header"
        try:
            "".join(fields).encode()
        except UnicodeEncodeError:
            return "broken UTF-8"
        return ""

    @property
    def _position(self) -> int:
        return self._lines.content.stored_position


def _outside_quotes(codes: NDArray[np.uint8], separator: str) -> NDArray[np.uint8] | None:
    """The text with zeros for what is in quotes; None if a quote is not where the grammar has it.

    A quote opens at the start of a field, and closes at its end; two are one that is in the field, and here
    close and open again. Records that are longer than a line may be are left to `_slow`, too.

    Args:
        codes: uint8 `[bytes]`, whole lines.
        separator: between fields.
    """
    quotes = np.flatnonzero(codes == ord('"'))
    ends = np.isin(codes, (ord(separator), ord("\n")))
    opening, closing = quotes[::2], quotes[1::2]
    if len(opening) != len(closing):
        return None
    starts = np.concatenate([[True], ends[:-1]])[opening]
    starts[1:] |= closing[:-1] + 1 == opening[1:]
    stops = np.concatenate([ends[1:], [True]])[closing]
    stops[:-1] |= closing[:-1] + 1 == opening[1:]
    if not (starts.all() and stops.all()):
        return None
    inside = np.zeros(len(codes), np.int8)
    inside[opening], inside[closing] = 1, -1
    outside = np.where(np.cumsum(inside, dtype=np.int8), 0, codes).astype(np.uint8)
    sizes = np.diff(np.flatnonzero(outside == ord("\n")), prepend=-1)
    return outside if sizes.max(initial=0) <= MAX_LINE_BYTES else None


class _Lines:
    """Lines of a block, of which those of the current record can be given back."""

    def __init__(self, text: bytes) -> None:
        decoded = text.decode(errors="surrogateescape")
        self._lines = deque(line + "\n" for line in decoded.split("\n"))
        if self._lines and self._lines[-1] == "\n":
            self._lines.pop()
        self._taken: list[str] = []
        self._size = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        if not self._lines:
            raise StopIteration
        if self._size > MAX_LINE_BYTES:
            raise OverflowError
        line = self._lines.popleft()
        self._taken.append(line)
        self._size += len(line)
        return line

    def begin(self) -> None:
        """Begin a record."""
        self._taken, self._size = [], 0

    def keep_first(self) -> None:
        """Give back the lines of the record but its first one."""
        self._lines.extendleft(reversed(self._taken[1:]))
        self._taken = self._taken[:1]

    @property
    def taken(self) -> str:
        """The record's lines."""
        return "".join(self._taken)
