"""The manifest of one save: its files with their digests, its tables, and the save that it builds on.

A save is a folder `saves/<sequence>-<epoch>/`; it is committed by its `manifest.json`, which is written last.
A full checkpoint is called a base, a delta checkpoint (the rows that changed) a row save, as in the files.
`cpr/checkpoint/format/FORMAT.md` describes every field for readers without this project.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar, Final, Literal

import xxhash

from cpr.checkpoint.storage.explain import check_path
from cpr.errors import CorruptFileError
from cpr.extent import Extent
from cpr.strict_json import build, parse

FORMAT: Final = "cpr-checkpoint"
VERSION: Final = 1
WEIGHTS: Final = "weights"
"""Name of the column with a table's weights; the other columns are optimizer states."""
SAVES: Final = "saves"
"""Folder of all saves in a checkpoint directory."""
ROW: Final = "row"
"""Name of the column with row ids, in row saves."""
COLUMN_DTYPES: Final = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")
_ROW_BYTES: Final = 2**30
"""Limit for the bytes of a row in a manifest, so that a forged one cannot exhaust memory."""
_NAME_BYTES: Final = 255
_NO_DIGEST: Final = "0" * 32
_NUMBERS: Final = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")

Kind = Literal["base", "rows"]
Moment = Literal["consistent", "rolling"]


def digest(data: Any) -> str:
    """XXH3-128 of bytes, as `xxhsum -H2` prints it."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True, kw_only=True)
class ColumnEntry:
    """A column of a table: its weights, or one optimizer state."""

    dtype: str
    """Data type of the live tensor: float32, float16, bfloat16, ...; int64 for row ids."""
    per_row: bool
    """Whether there is one number per row; otherwise one per element."""

    @property
    def item_bytes(self) -> int:
        """Bytes of a number, from the bits that the name of the dtype ends with."""
        return int(self.dtype.lstrip("abcdefghijklmnopqrstuvwxyz")) // 8


@dataclass(frozen=True, kw_only=True)
class TableEntry:
    """One table of the model."""

    rows: int
    cols: int
    columns: Mapping[str, ColumnEntry]
    """`weights` and the optimizer states by name."""
    counters: Mapping[str, int | float] = field(default_factory=dict)
    """Scalars of the table's optimizer, such as its step, by name."""


@dataclass(frozen=True, kw_only=True)
class ChunkEntry:
    """A part of a row file: one Arrow record batch, which can be read and verified alone."""

    offset: int
    """Offset of the encapsulated Arrow message in the file, in bytes."""
    length: int
    """Length of the message with its body, in bytes."""
    num_rows: int
    first_row: int
    last_row: int
    """Largest row id; a base's chunks hold all row ids from first to last, in order."""
    digest: str


@dataclass(frozen=True, kw_only=True)
class RowFileEntry(Extent):
    """An Arrow IPC file with rows of one shard, of this extent, and their optimizer state."""

    path: str
    """Relative to the save's folder."""
    num_bytes: int
    digest: str
    """XXH3-128 of the whole file."""
    columns: Mapping[str, ColumnEntry]
    """Columns of the file, in its order: `row` (row ids; row saves only), `weights`, the optimizer states."""
    codec: str
    """Codec of the weights, see `cpr.checkpoint.format.codecs`. Optimizer state is never encoded."""
    max_error: float
    """Largest absolute error of a weight by the codec: 0.0 for exact; of a merged file, the largest of the
    files that it was merged from."""
    first_step: int
    last_step: int
    """Training step of the newest row; in a rolling save it may be later than the manifest's `step`."""
    chunks: Sequence[ChunkEntry]

    @property
    def extent(self) -> Extent:
        """Rows and columns of the table that the file's shard covers."""
        return Extent(**{each.name: getattr(self, each.name) for each in fields(Extent)})


@dataclass(frozen=True, kw_only=True)
class StateFileEntry:
    """An Arrow IPC file with everything that is not a table, see `cpr.checkpoint.format.tree_file`."""

    path: str
    num_bytes: int
    digest: str
    rank: int | None
    """The rank that the file belongs to; None: the same for all ranks."""


FileEntry = RowFileEntry | StateFileEntry


@dataclass(frozen=True, kw_only=True)
class Parent:
    """Reference to the save before this one in its chain."""

    sequence: int
    digest: str
    """XXH3-128 of the parent's manifest.json."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a manifest.json: one committed save."""

    run_id: str
    sequence: int
    """Number of the save among all saves of the directory; part of its folder's name."""
    kind: Kind
    parent: Parent | None
    """None for a base; the previous save of the chain for a row save."""
    base: int
    """Sequence of the chain's base; the save's own for a base."""
    moment: Moment
    """`consistent`: all rows and the state are from `step`. `rolling`: the state is from `step`, when the
    save began, and each row from `step` or one of the steps after it until copying ended. A merged base is
    `rolling`, too: its rows are as old as the saves that it was merged from."""
    step: int
    """Training steps done when the save began, as the state files say."""
    created: str
    """ISO 8601, UTC."""
    world_size: int
    tables: Mapping[str, TableEntry]
    rows: Sequence[RowFileEntry]
    states: Sequence[StateFileEntry]
    merged: Sequence[int] = ()
    """Sequences of the saves that a merged base was made from; else empty."""
    epoch: int = 0
    """Epoch of the owner that wrote it (`cpr.checkpoint.ownership.records`); 0: written before epochs."""
    _stored_digest: ClassVar[str] = ""
    """Digest of the file that a manifest was read from: another version of this program may have written the
    same content with other bytes. Not a field, so that a changed copy does not have it."""

    @property
    def folder(self) -> str:
        """Folder of the save, relative to the checkpoint directory."""
        return save_folder(self.sequence, self.epoch)

    @property
    def path(self) -> str:
        """Path of the manifest.json, relative to the checkpoint directory."""
        return f"{self.folder}/manifest.json"

    @property
    def file_digest(self) -> str:
        """XXH3-128 of the manifest.json, by which row saves name their parent."""
        if not self._stored_digest:
            object.__setattr__(self, "_stored_digest", digest(self.to_json()))
        return self._stored_digest

    def without_chunks(self) -> "Manifest":
        """The same save without the entries of chunks, of which there may be millions."""
        short = replace(self, rows=tuple(replace(entry, chunks=()) for entry in self.rows))
        # Row saves on top of this one name it by the digest of the full manifest.
        object.__setattr__(short, "_stored_digest", self.file_digest)
        return short

    def rows_of(self, table_fqn: str) -> Sequence[RowFileEntry]:
        """The row files of one table."""
        return self._by_table.get(table_fqn, ())

    @cached_property
    def _by_table(self) -> dict[str, list[RowFileEntry]]:
        found: dict[str, list[RowFileEntry]] = {}
        for entry in self.rows:
            found.setdefault(entry.table_fqn, []).append(entry)
        return found

    @property
    def num_bytes(self) -> int:
        """Bytes of all files of the save, without the manifest."""
        return sum(entry.num_bytes for entry in self.files)

    @property
    def files(self) -> list[FileEntry]:
        """All files of the save but the manifest."""
        return [*self.rows, *self.states]

    def to_json(self) -> bytes:
        """The stored form; contains the XXH3-128 of the whole file, taken with 32 zeros in its place."""
        body = {"format": FORMAT, "version": VERSION, "digest": _NO_DIGEST, **asdict(self)}
        data = (json.dumps(body, indent=1) + "\n").encode()
        return data.replace(_NO_DIGEST.encode(), digest(data).encode(), 1)

    def check(self) -> None:
        """Refuse a manifest that no writer makes.

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
        for file in self.files:
            _check_file(file)
        for entry in self.rows:
            _check_rows(entry, self.tables.get(entry.table_fqn), self.kind)
        paths = [file.path for file in self.files]
        ranks = [entry.rank for entry in self.states]
        if len(set(paths)) < len(paths) or len(set(ranks)) < len(ranks):
            raise ValueError("two entries are the same file, or two state files are the same rank's")

    @classmethod
    def from_json(cls, data: bytes, path: str) -> "Manifest":
        """Parse and check a manifest.

        Raises:
            CorruptFileError: `data` is not a manifest of this version, or damaged.
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


def _check_file(entry: FileEntry) -> None:
    check_path(entry.path)
    names = entry.path.encode().split(b"/")
    if not entry.path or "\0" in entry.path or max(map(len, names)) > _NAME_BYTES:
        raise ValueError(f"{entry.path[:60]!r} is no name of a file")
    _check_digest(entry.digest, entry.path)


def _check_digest(found: str, what: str) -> None:
    if not re.fullmatch("[0-9a-f]{32}", found):
        raise ValueError(f"{what} has {found[:60]!r} for a digest")


def _check_rows(entry: RowFileEntry, table: TableEntry | None, kind: Kind) -> None:
    """Refuse a row file that is not a part of its table or has other columns than the table."""
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
    """Refuse chunks that do not ascend in the file and the shard, or that leave out rows of a base."""
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
    """Folder of a save, relative to the checkpoint directory. No two owners ever write to the same folder."""
    return f"{SAVES}/{sequence:08d}" + (f"-{epoch}" if epoch else "")


def numbers_of(name: str) -> tuple[int, int] | None:
    """Sequence and epoch in the name of a folder in `saves/`; None: the folder is not of a save."""
    match = _NUMBERS.fullmatch(name)
    return (int(match[1]), int(match[2] or 0)) if match else None
