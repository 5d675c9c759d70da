"""The manifest of one save: what is in it, where, with which digest, and on what it builds.

A save is a folder `saves/<sequence>-<epoch>/`; it counts from the moment its `manifest.json` is there, which
is written last. `cpr/checkpoint/FORMAT.md` describes every field for readers without this project.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Final, Literal

import xxhash

from cpr.errors import CorruptFileError

FORMAT: Final = "cpr-checkpoint"
VERSION: Final = 1
WEIGHTS: Final = "weights"
"""The column of a table's weights; the others are states of its optimizer."""
SAVES: Final = "saves"
"""Folder of all saves."""
_NO_DIGEST: Final = "0" * 32
_NUMBERS: Final = re.compile(r"([0-9]+)(?:-([0-9]+))?")

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


@dataclass(frozen=True, kw_only=True)
class StateFileEntry:
    """An Arrow IPC file with everything that is not a table: see `cpr.checkpoint.state`."""

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
    """Of the owner that wrote it (`cpr.checkpoint.owners`); 0: of a version that knew none."""
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
        return self._stored_digest or digest(self.to_json())

    @property
    def num_bytes(self) -> int:
        """Of all files, without the manifest."""
        return sum(entry.num_bytes for entry in self.rows) + sum(entry.num_bytes for entry in self.states)

    def to_json(self) -> bytes:
        """As it is stored, with the XXH3-128 of the whole file in it, taken while 32 zeros stood for it."""
        body = {"format": FORMAT, "version": VERSION, "digest": _NO_DIGEST, **asdict(self)}
        data = (json.dumps(body, indent=1) + "\n").encode()
        return data.replace(_NO_DIGEST.encode(), digest(data).encode(), 1)

    @classmethod
    def from_json(cls, data: bytes, path: str) -> "Manifest":
        """Read one back.

        Raises:
            CorruptFileError: not a manifest of this version, or damaged.
        """
        try:
            body = json.loads(data)
            name, version, own_digest = body.pop("format"), body.pop("version"), body.pop("digest", "")
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise CorruptFileError(f"{path} is not a manifest ({error})") from error
        if (name, version) != (FORMAT, VERSION):
            raise CorruptFileError(
                f"{path} has format {name} {version}; this program reads {FORMAT} {VERSION}"
            )
        if digest(data.replace(str(own_digest).encode(), _NO_DIGEST.encode(), 1)) != own_digest:
            raise CorruptFileError(f"{path} differs from the digest in it: it is damaged or was edited")
        try:
            manifest = cls(
                **{
                    **body,
                    "parent": None if body["parent"] is None else Parent(**body["parent"]),
                    "tables": {fqn: _table(entry) for fqn, entry in body["tables"].items()},
                    "rows": tuple(_row_file(entry) for entry in body["rows"]),
                    "states": tuple(StateFileEntry(**entry) for entry in body["states"]),
                    "merged": tuple(body["merged"]),
                }
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"{path} is not a complete manifest ({error})") from error
        object.__setattr__(manifest, "_stored_digest", digest(data))
        return manifest


def _table(entry: Mapping[str, Any]) -> TableEntry:
    columns = {name: ColumnEntry(**column) for name, column in entry["columns"].items()}
    return TableEntry(**{**entry, "columns": columns})


def _row_file(entry: Mapping[str, Any]) -> RowFileEntry:
    return RowFileEntry(
        **{
            **entry,
            "table_shape": tuple(entry["table_shape"]),
            "columns": {name: ColumnEntry(**column) for name, column in entry["columns"].items()},
            "chunks": tuple(ChunkEntry(**chunk) for chunk in entry["chunks"]),
        }
    )


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
