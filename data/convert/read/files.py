"""The input files: their formats, columns and order, and their rows as blocks."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any, Final

import numpy as np
import polars as pl

from data.convert.read.blocks import BadRow, Block
from data.convert.read.delimited import SEPARATORS, DelimitedReader
from data.convert.read.jsonl import JsonReader, look_at
from data.convert.read.parquet import ParquetReader
from data.jobs.location import Location
from data.schema import Schema
from data.text.content import open_content
from data.text.streams import LineReader

FORMATS: Final = {
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_COMPRESSED: Final = (".gz", ".zst")
_HEAD_BYTES: Final = 1 << 20
LOOK_BYTES: Final = 1 << 18
"""Text from which the columns of JSON lines are known."""
TRUNCATED: Final = "the compressed file is cut off or damaged here"


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """A file of the input."""

    path: Location
    """Where it is."""
    name: str
    """Path below the folder that all files have in common; unique."""
    format: str
    """One of the values of `FORMATS`."""
    num_bytes: int
    """Size as stored."""
    head_sha256: str
    """Digest of its first MiB."""
    lists: tuple[str, ...]
    """Columns of JSON lines that hold lists."""

    @property
    def identity(self) -> dict[str, Any]:
        """Properties that must be equal to continue a job."""
        return {"name": self.name, "num_bytes": self.num_bytes, "head_sha256": self.head_sha256}

    def blocks(self, columns: Sequence[str], skipped: int, block_bytes: int) -> Iterator[Block]:
        """Records after the first `skipped` ones, with the columns `columns`.

        Texts are read from their start, as only reading tells where a record begins.

        Raises:
            ValueError: the file is damaged.
        """
        if self.format == "parquet":
            with closing(ParquetReader(self.path, columns)) as reader:
                for block in reader.blocks(skipped, block_bytes):
                    yield from _after(block, skipped)
            return
        with closing(open_content(self.path, [0])) as content:
            lines = LineReader(content, 0, block_bytes)
            number = 0
            for block in self._text_blocks(lines, columns):
                number += block.num_records
                yield from _after(block, skipped)
            if content.damage or content.trailing:
                reason = TRUNCATED if content.damage else "bytes after the end of the compressed data"
                empty = pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
                bad = [BadRow(number + 1, reason, content.damage or "")]
                yield Block(empty, np.empty(0, np.int64), 1, content.stored_position, bad)

    def _text_blocks(self, lines: LineReader, columns: Sequence[str]) -> Iterator[Block]:
        if self.format == "jsonl":
            return JsonReader(lines, columns, self.lists).blocks()
        return DelimitedReader(lines, SEPARATORS[self.format], columns).blocks()


def find_inputs(paths: Sequence[Location], schema: Schema) -> tuple[InputFile, ...]:
    """Look at the input files, in the given order.

    Raises:
        ValueError: one is missing, empty, given twice, of an unknown format, or lacks a column.
    """
    for path in paths:
        if path.size() is None:
            raise ValueError(f"{path} is not a file; name the files of the table themselves")
    names = _names(paths)
    label = schema.label.column
    inputs = [input_file(path, name, schema.columns, label) for path, name in zip(paths, names, strict=True)]
    lists = {name for one in schema.sparse if one.is_list for name in (one.column, one.weights)}
    return tuple(replace(one, lists=tuple(name for name in one.lists if name in lists)) for one in inputs)


def format_of(path: Location) -> str:
    """Format of a file by its name.

    Raises:
        ValueError: the name says none.
    """
    suffixes = [one.lower() for one in PurePosixPath(path.name).suffixes if one.lower() not in _COMPRESSED]
    found = FORMATS.get(suffixes[-1]) if suffixes else None
    if found is None:
        raise ValueError(
            f"{path}: the format is told from the name; rename it to end in {', '.join(FORMATS)} "
            "(texts may be compressed, with .gz or .zst after that)"
        )
    return found


def columns_of(path: Location, kind: str) -> tuple[list[str], list[str]]:
    """Columns of a file, and those that hold lists where that shows (JSON lines).

    Raises:
        ValueError: the file is empty or not of that format.
    """
    if kind == "parquet":
        with closing(ParquetReader(path, [])) as reader:
            return reader.names, []
    with closing(open_content(path, [0])) as content:
        lines = LineReader(content, 0, LOOK_BYTES)
        if kind == "jsonl":
            text = next(lines.blocks(lambda: None), b"")
            names, lists = look_at(text)
        else:
            names, lists = DelimitedReader(lines, SEPARATORS[kind], []).names, []
        if content.damage and not names:
            raise ValueError(f"{path} cannot be decompressed: {content.damage}")
    if not names:
        raise ValueError(f"{path} is empty, or not {kind}; get it again or leave it out")
    return names, lists


def input_file(path: Location, name: str, columns: Sequence[str], label: str = "") -> InputFile:
    """Look at a file of which some columns, perhaps a `label`, are to be read.

    Raises:
        ValueError: it is empty, of an unknown format, or lacks a column.
    """
    kind = format_of(path)
    try:
        found, lists = columns_of(path, kind)
    except ValueError as error:
        raise ValueError(f"{path}: {error}" if str(path) not in str(error) else str(error)) from error
    for column in columns:
        if column not in found:
            hint = _hint(found, kind, is_label=column == label)
            shown = ", ".join(map(repr, found[:50]))
            raise ValueError(f"{path} has no column {column!r}; its columns are {shown}{hint}")
        if found.count(column) > 1:
            raise ValueError(f"{path} has {found.count(column)} columns {column!r}; rename one of them")
    with path.open() as stream:
        digest = hashlib.sha256(stream.read(_HEAD_BYTES)).hexdigest()
    return InputFile(
        path=path,
        name=name,
        format=kind,
        num_bytes=path.size() or 0,
        head_sha256=digest,
        lists=tuple(one for one in lists if one in columns),
    )


def _hint(found: Sequence[str], kind: str, *, is_label: bool) -> str:
    """What may be wrong with a file whose columns are `found`, among which one is missing."""
    if any("\0" in name or "\N{REPLACEMENT CHARACTER}" in _as_utf8(name) for name in found):
        return "; it is not UTF-8 (is it UTF-16? then write it again as UTF-8)"
    hint = ""
    if len(found) == 1 and kind in SEPARATORS:
        used, other, name = ("comma", "tabs", ".tsv") if kind == "csv" else ("tab", "commas", ".csv")
        hint = (
            f"; its header has no {used} (is it separated by {other}? then name it {name}; by something "
            "else? then write it again with commas)"
        )
    return hint + ("; rows without labels, to be scored, take --no-labels" if is_label else "")


def _as_utf8(name: str) -> str:
    return name.encode(errors="surrogateescape").decode(errors="replace")


def _names(paths: Sequence[Location]) -> list[str]:
    absolute = [os.path.abspath(path.path) for path in paths]  # noqa: PTH100  # links stay what they are
    seen: dict[object, str] = {}
    for path, name in zip(paths, absolute, strict=True):
        state = path.local.stat() if path.local is not None else None
        first = seen.setdefault((state.st_dev, state.st_ino) if state else name, name)
        if first is not name:
            link = f" ({first} is the same file)" if first != name else ""
            raise ValueError(f"{name} is given more than once{link}")
    common = os.path.commonpath([os.path.dirname(path) for path in absolute])  # noqa: PTH120
    return [os.path.relpath(path, common) for path in absolute]


def _after(block: Block, skipped: int) -> Iterator[Block]:
    """The block without the records that an earlier start has finished."""
    if not skipped:
        yield block
        return
    keep = int(np.searchsorted(block.rows, skipped, side="right"))
    bad = [one for one in block.bad if one.row > skipped]
    left = block.frame.slice(keep)
    if left.height or bad:
        yield Block(left, block.rows[keep:], left.height + len(bad), block.stored_position, bad)
