"""Reads JSON lines with polars, every value as a text; a line that polars refuses is found by halving.

polars makes texts of lists and objects too, and U+0000 of half a surrogate pair, so that Python judges rows
with such texts. It judges refused lines as well, to say what is wrong with them.
"""

import io
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import isfinite
from typing import Any, Final

import polars as pl

from data.convert.read.blocks import BadRow, Block, numbered
from data.text.streams import LineReader

_TEXT_LENGTH: Final = 4096
_NOT_FINITE: Final = "a number that is not finite: NaN, Infinity, or one too large for a float"
_SUSPECT: Final = r"^[\[{]|\x00"
"""Texts that polars may have made of something else."""
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class JsonReader:
    """Records of a file of JSON lines.

    Args:
        lines: the file, at its start.
        columns: names to read.
        lists: those of `columns` that hold lists.
    """

    def __init__(self, lines: LineReader, columns: Sequence[str], lists: Sequence[str]) -> None:
        self._lines = lines
        self._parser = JsonParser(columns, lists)

    def blocks(self) -> Iterator[Block]:
        """All records; empty lines are none."""
        first = 1
        for text in self._lines.blocks(lambda: None):
            lines = [line for line in text.split(b"\n") if line.strip()]
            if lines:
                frame, bad = self._parser.parse(lines, first)
                rows = numbered(first, frame.height, bad)
                yield Block(frame, rows, len(lines), self._lines.content.stored_position, bad)
            first += len(lines)


class JsonParser:
    """Parses JSON objects, one a line.

    Args:
        columns: names to read.
        lists: those of `columns` that hold lists.
    """

    def __init__(self, columns: Sequence[str], lists: Collection[str]) -> None:
        self._lists = frozenset(lists)
        self._schema: Mapping[str, pl.DataType] = {
            name: pl.List(pl.String) if name in lists else pl.String() for name in columns
        }

    def parse(self, lines: Sequence[bytes], first: int) -> tuple[pl.DataFrame, list[BadRow]]:
        """Parse lines.

        Args:
            lines: without line ends in them.
            first: number of the first line.

        Returns:
            Rows of the good lines in order, with the columns as String or List(String); and the bad ones.
        """
        frames: list[pl.DataFrame] = [pl.DataFrame(schema=self._schema)]
        bad: list[BadRow] = []
        self._parse(lines, first, frames, bad)
        return pl.concat(frames), bad

    def _parse(
        self, lines: Sequence[bytes], first: int, frames: list[pl.DataFrame], bad: list[BadRow]
    ) -> None:
        try:
            frame = pl.read_ndjson(io.BytesIO(b"\n".join(lines)), schema=self._schema)
            whole = frame.height == len(lines)
        except pl.exceptions.PolarsError:
            whole = False
        if whole:
            wrong = {at: reason for at in self._suspects(frame) if (reason := self._judge(lines[at]))}
            bad += [_bad_row(first + at, reason, lines[at]) for at, reason in wrong.items()]
            frames.append(frame.filter([at not in wrong for at in range(len(lines))]) if wrong else frame)
        elif len(lines) == 1:
            bad.append(_bad_row(first, self._judge(lines[0]) or "no JSON that can be read", lines[0]))
        elif lines:
            middle = len(lines) // 2
            self._parse(lines[:middle], first, frames, bad)
            self._parse(lines[middle:], first + middle, frames, bad)

    def _suspects(self, frame: pl.DataFrame) -> list[int]:
        """Rows with a text that Python has to judge."""
        suspect = pl.element().str.contains(_SUSPECT)
        masks = [
            pl.col(name).list.eval(suspect).list.any()
            if name in self._lists
            else pl.col(name).str.contains(_SUSPECT)
            for name in self._schema
        ]
        return frame.select(pl.any_horizontal(masks).fill_null(False).arg_true()).to_series().to_list()

    def _judge(self, line: bytes) -> str:
        """Reason to refuse a line; empty if none is found."""
        try:
            found = _DECODER.decode(line.decode())
        except UnicodeDecodeError:
            return "broken UTF-8"
        except OverflowError:
            return _NOT_FINITE
        except (ValueError, RecursionError):
            return "no JSON"
        if not isinstance(found, dict):
            return "no JSON object"
        faults = (_fault(found.get(name), name in self._lists) for name in self._schema)
        return next(filter(None, faults), "")


def _fault(value: Any, is_list: bool) -> str:
    """Why a value does not fit its column; empty if it does."""
    if is_list and value is not None and not isinstance(value, list):
        return "no list where the others have one"
    for text in (value or ()) if is_list else (value,):
        if isinstance(text, str):
            if not text.isascii() and _SURROGATES.search(text):
                return "half a surrogate pair, which is no text"
        elif isinstance(text, list | dict):
            return "a list or object where a text should be (lists need list = true)"
    return ""


def _first_of_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of which polars takes the first value of a key."""
    return dict(reversed(pairs))


def _finite(text: str) -> float:
    number = float(text)
    if not isfinite(number):
        raise OverflowError
    return number


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_first_of_each, parse_int=str, parse_float=_finite, parse_constant=_finite
)


def _bad_row(row: int, reason: str, line: bytes) -> BadRow:
    return BadRow(row, reason, line.decode(errors="backslashreplace")[:_TEXT_LENGTH])


def look_at(text: bytes) -> tuple[list[str], list[str]]:
    """Columns that occur in the first lines of a file, and those of them that hold lists.

    Args:
        text: whole lines.
    """
    kinds: dict[str, bool] = {}
    for line in text.split(b"\n"):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        for name, value in found.items() if isinstance(found, dict) else ():
            if value is not None or name not in kinds:
                kinds[name] = kinds.get(name, False) or isinstance(value, list)
    return list(kinds), [name for name, is_list in kinds.items() if is_list]
