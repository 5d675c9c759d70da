"""The manifest of one save: what is in it, where, with which digest, and on what it builds.

A save is a folder `saves/<sequence>-<epoch>/`; it counts from the moment its `manifest.json` is there, which
is written last. `cpr/checkpoint/format/FORMAT.md` describes every field for readers without this project.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from typing import Any, ClassVar, Final, Literal

import xxhash

from cpr.checkpoint.storage.errors import check_path
from cpr.errors import CorruptFileError
from cpr.extent import Extent
from cpr.strict_json import build, parse

FORMAT: Final = "cpr-checkpoint"
VERSION: Final = 1
WEIGHTS: Final = "weights"
"""The column of a table's weights; the others are states of its optimizer."""
SAVES: Final = "saves"
"""Folder of all saves."""
ROW: Final = "row"
"""Column of the row ids, in row saves."""
COLUMN_DTYPES: Final = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")
"""Data types of live columns that row files can hold."""
_ROW_BYTES: Final = 2**30
"""More than any row has: of a larger one not even a single row could be held in memory."""
_NAME_BYTES: Final = 255
"""The longest name of a file that file systems take."""
_NO_DIGEST: Final = "0" * 32
_NUMBERS: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")

Kind = Literal["base", "rows"]
Moment = Literal["consistent", "rolling"]


def digest(data: Any) -> str:
    """XXH3-128 of bytes, as `xxhsum -H2` prints it."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, kw_only=True)
class ColumnEntry:
    """One column of a table: its weights, or a state of its optimizer."""

    dtype: str
    """Of the live tensor: float32, float16, bfloat16, ...; int64 for row ids."""
    per_row: bool
    """One number a row; otherwise one an element."""

    @property
    def item_bytes(self) -> int:
        """Bytes of a number: what the digits at the end of a dtype's name say in bits."""
        return int(self.dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One table of the model, whole."""

    rows: int
    cols: int
    columns: Mapping[str, ColumnEntry]
    """`weights` and the optimizer states by name."""
    counters: Mapping[str, int | float] = field(default_factory=dict)
    """Scalars of its optimizer that are not per row."""


@dataclass(frozen=True, kw_only=True)
class ChunkEntry:
    """Some rows inside a row file: one Arrow record batch, which can be read and verified alone."""

    offset: int
    """Of the encapsulated Arrow message in the file, bytes."""
    length: int
    """Of the message with its body, bytes."""
    num_rows: int
    first_row: int
    """Smallest row id in it."""
    last_row: int
    """Largest row id in it; a base's chunks hold all row ids from first to last, in order."""
    digest: str
    """XXH3-128 of these bytes."""


@dataclass(frozen=True, kw_only=True)
class RowFileEntry:
    """An Arrow IPC file with rows of one shard, their optimizer state beside them."""

    path: str
    """Relative to the save's folder."""
    num_bytes: int
    digest: str
    """XXH3-128 of the whole file."""
    table_fqn: str
    table_shape: tuple[int, int]
    """Rows and columns of the whole table."""
    columns: Mapping[str, ColumnEntry]
    """What the file holds, in its order: `row` (row ids; row saves only), `weights`, the optimizer states."""
    row_offset: int
    """The shard that the rows are from: its place in the table."""
    num_rows: int
    col_offset: int
    num_cols: int
    codec: str
    """Of the weights: fp32, fp16, int8, int4; `exact` keeps the table's own dtype. State is never encoded."""
    max_error: float
    """Largest absolute difference that the codec made to a weight: 0.0 for exact; of a file that was merged
    from others, the largest of theirs."""
    first_step: int
    """Training step of the oldest row in it."""
    last_step: int
    """Training step of the newest row in it; in a rolling save it may be later than the manifest's `step`."""
    chunks: Sequence[ChunkEntry]

    @property
    def extent(self) -> Extent:
        """Of the shard that the rows are from."""
        return Extent(
            table_fqn=self.table_fqn,
            table_shape=self.table_shape,
            row_offset=self.row_offset,
            num_rows=self.num_rows,
            col_offset=self.col_offset,
            num_cols=self.num_cols,
        )


@dataclass(frozen=True, kw_only=True)
class StateFileEntry:
    """An Arrow IPC file with everything that is not a table: see `cpr.checkpoint.format.tree_file`."""

    path: str
    num_bytes: int
    digest: str
    rank: int | None
    """The rank that it belongs to; None: the same for all."""


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The save before this one in its chain."""

    sequence: int
    digest: str
    """XXH3-128 of its manifest.json."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One committed save."""

    run_id: str
    sequence: int
    """Counts all saves of a directory; the number of its folder."""
    kind: Kind
    parent: Parent | None
    """None for a base; the previous save of the chain for a row save."""
    base: int
    """Sequence of the base of the chain; its own for a base."""
    moment: Moment
    """`consistent`: all rows and the state are from `step`. `rolling`: the state is from `step`, when the
    save began, and each row from `step` or from one of the steps after it until copying ended. A merged base
    is called `rolling`, too: its rows are as old as the saves that went into it."""
    step: int
    """Training steps done, as the state in it says: the same on all ranks, and when the save began."""
    created: str
    """ISO 8601, UTC."""
    world_size: int
    tables: Mapping[str, TableEntry]
    rows: Sequence[RowFileEntry]
    states: Sequence[StateFileEntry]
    merged: Sequence[int] = ()
    """A base made by merging: the sequences of the saves that went into it."""
    epoch: int = 0
    """Of the owner that wrote it (`cpr.checkpoint.ownership.records`); 0: of a version that knew none."""
    _stored_digest: ClassVar[str] = ""
    """Of the file that a manifest was read from: another version of this program may have written the same
    with other bytes. No field, so that a changed copy does not have it."""

    @property
    def folder(self) -> str:
        """Where its files are, relative to the checkpoint directory."""
        return save_folder(self.sequence, self.epoch)

    @property
    def path(self) -> str:
        """Of its manifest.json, relative to the checkpoint directory."""
        return manifest_path(self.sequence, self.epoch)

    @property
    def file_digest(self) -> str:
        """XXH3-128 of its manifest.json: what a save on top of it calls its parent by."""
        if not self._stored_digest:
            object.__setattr__(self, "_stored_digest", digest(self.to_json()))
        return self._stored_digest

    def without_chunks(self) -> "Manifest":
        """The same save without the entries of chunks, of which there may be millions."""
        short = replace(self, rows=tuple(replace(entry, chunks=()) for entry in self.rows))
        object.__setattr__(short, "_stored_digest", self.file_digest)
        return short

    @property
    def num_bytes(self) -> int:
        """Of all files, without the manifest."""
        return sum(entry.num_bytes for entry in self.rows) + sum(entry.num_bytes for entry in self.states)

    def to_json(self) -> bytes:
        """As it is stored, with the XXH3-128 of the whole file in it, taken while 32 zeros stood for it."""
        body = {"format": FORMAT, "version": VERSION, "digest": _NO_DIGEST, **asdict(self)}
        data = (json.dumps(body, indent=1) + "\n").encode()
        return data.replace(_NO_DIGEST.encode(), digest(data).encode(), 1)

    def check(self) -> None:
        """Refuse what no writer makes, and no reader could rely on.

        Raises:
            ValueError: its parts contradict each other, or name places outside of their file or table.
        """
        if self.world_size < 1 or self.base > self.sequence:
            raise ValueError(f"{self.world_size} ranks have saved {self.sequence} on base {self.base}")
        if any(sequence >= self.sequence for sequence in self.merged):
            raise ValueError(f"save {self.sequence} was merged from later ones: {list(self.merged)}")
        if datetime.fromisoformat(self.created).tzinfo is None:
            raise ValueError(f"created is {self.created!r}, a time without a time zone")
        for name, table in self.tables.items():
            _check_table(name, table)
        files: list[RowFileEntry | StateFileEntry] = [*self.rows, *self.states]
        for file in files:
            _check_file(file)
        for entry in self.rows:
            _check_rows(entry, self.tables.get(entry.table_fqn), self.kind)
        paths = [file.path for file in files]
        ranks = [entry.rank for entry in self.states]
        if len(set(paths)) < len(paths) or len(set(ranks)) < len(ranks):
            raise ValueError("two entries are the same file, or two state files are the same rank's")

    @classmethod
    def from_json(cls, data: bytes, path: str) -> "Manifest":
        """Read one back.

        Raises:
            CorruptFileError: not a manifest of this version, or damaged.
        """
        try:
            body = parse(data)
            name, version, own_digest = body.pop("format"), body.pop("version"), body.pop("digest", "")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptFileError(f"{path} is not a manifest ({error})") from error
        if (name, version) != (FORMAT, VERSION):
            raise CorruptFileError(
                f"{path} has format {name} {version}; this program reads {FORMAT} {VERSION}"
            )
        stated = str(own_digest).encode(errors="replace")
        if digest(data.replace(stated, _NO_DIGEST.encode(), 1)) != own_digest:
            raise CorruptFileError(f"{path} differs from the digest in it: it is damaged or was edited")
        try:
            manifest = build(cls, body)
            manifest.check()
        except ValueError as error:
            raise CorruptFileError(f"{path} is no manifest that a save has written: {error}") from error
        object.__setattr__(manifest, "_stored_digest", digest(data))
        return manifest


def _check_table(name: str, table: TableEntry) -> None:
    if WEIGHTS not in table.columns or ROW in table.columns:
        raise ValueError(f"table {name} has columns {', '.join(table.columns)}")
    for column in table.columns.values():
        if column.dtype not in COLUMN_DTYPES:
            raise ValueError(f"table {name} has a column of {column.dtype!r}, not {', '.join(COLUMN_DTYPES)}")
    widths = (column.item_bytes * (1 if column.per_row else table.cols) for column in table.columns.values())
    if (row_bytes := sum(widths)) > _ROW_BYTES:
        raise ValueError(f"table {name} has {table.cols} columns: {row_bytes} bytes a row")


def _check_file(entry: RowFileEntry | StateFileEntry) -> None:
    check_path(entry.path)
    names = entry.path.encode().split(b"/")
    if not entry.path or "\0" in entry.path or max(map(len, names)) > _NAME_BYTES:
        raise ValueError(f"{entry.path[:60]!r} is no name of a file")
    _check_digest(entry.digest, entry.path)


def _check_digest(found: str, what: str) -> None:
    if not re.fullmatch("[0-9a-f]{32}", found):
        raise ValueError(f"{what} has {found[:60]!r} for a digest")


def _check_rows(entry: RowFileEntry, table: TableEntry | None, kind: Kind) -> None:
    """A file holds a part of its table, columns as the table's."""
    if table is None:
        raise ValueError(f"{entry.path} has rows of table {entry.table_fqn}, which is not among the tables")
    rows, cols = entry.row_offset + entry.num_rows, entry.col_offset + entry.num_cols
    is_part = 1 <= entry.num_rows <= rows <= table.rows and 1 <= entry.num_cols <= cols <= table.cols
    if entry.table_shape != (table.rows, table.cols) or not is_part:
        raise ValueError(
            f"{entry.path} has {entry.num_rows} rows to {rows} and {entry.num_cols} columns to {cols} of a "
            f"table of {entry.table_shape}; table {entry.table_fqn} is {table.rows} x {table.cols}"
        )
    ids = {ROW: ColumnEntry(dtype="int64", per_row=True)} if kind == "rows" else {}
    if entry.columns != (wanted := {**ids, **table.columns}):
        raise ValueError(
            f"{entry.path} of a save of kind {kind!r} has columns {entry.columns}, and should have {wanted}"
        )
    _check_chunks(entry, kind)


def _check_chunks(entry: RowFileEntry, kind: Kind) -> None:
    """Chunks ascend inside the file and inside the shard; those of a base leave no row out."""
    byte, row = 0, entry.row_offset
    for at, chunk in enumerate(entry.chunks):
        where = f"{entry.path}: chunks[{at}]"
        end, end_row = chunk.offset + chunk.length, chunk.last_row + 1
        if chunk.offset < byte or end > entry.num_bytes:
            raise ValueError(f"{where} is at bytes {chunk.offset} to {end} of {entry.num_bytes}")
        if 2 * chunk.length < chunk.num_rows * max(entry.num_cols, 2):  # int4 takes half a byte a weight
            raise ValueError(f"{where} has {chunk.num_rows} rows of {entry.num_cols} in {chunk.length} bytes")
        if not row <= chunk.first_row < end_row or not 1 <= chunk.num_rows <= end_row - chunk.first_row:
            raise ValueError(
                f"{where} has {chunk.num_rows} rows from {chunk.first_row} to {chunk.last_row}, where row "
                f"{row} or a later one is next"
            )
        if kind == "base" and (chunk.first_row > row or chunk.num_rows < end_row - row):
            raise ValueError(f"{entry.path} is of a base and has no chunk with row {row}")
        _check_digest(chunk.digest, where)
        byte, row = end, end_row
    end = entry.row_offset + entry.num_rows
    if row > end:
        raise ValueError(f"{entry.path} has rows to {row - 1}, its shard to {end - 1}")
    if kind == "base" and row < end:
        raise ValueError(f"{entry.path} is of a base and has no chunk with row {row}")


def save_folder(sequence: int, epoch: int = 0) -> str:
    """Folder of a save, relative to the checkpoint directory. No two owners ever write to the same one."""
    return f"{SAVES}/{sequence:08d}" + (f"-{epoch}" if epoch else "")


def manifest_path(sequence: int, epoch: int = 0) -> str:
    """Path of a save's manifest, relative to the checkpoint directory."""
    return f"{save_folder(sequence, epoch)}/manifest.json"


def numbers_of(name: str) -> tuple[int, int] | None:
    """Sequence and epoch that the name of a folder in `saves/` begins with; None: it is no save's."""
    match = _NUMBERS.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None
