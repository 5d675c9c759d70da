"""Commits pieces of work: the files of a piece are synced and renamed, then its record.

A record is a small JSON file. A piece with a record is finished and never repeated, unless its files were
removed meanwhile. Files without a record do not count, whenever their writer was killed. The state of a
running job is in the folder `.prepare` of the output and is removed at the end.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

STATE_FOLDER: Final = ".prepare"
TEMPORARY_SUFFIX: Final = ".tmp"


@dataclass(frozen=True, kw_only=True)
class Written:
    """Files written for a piece; no Parquet file if the piece has no good line, or was only counted."""

    row_groups: tuple[int, ...] = ()
    """Rows of the row groups of its Parquet file."""
    num_bytes: int = 0
    """Size of that file; of its runs together, in the counting pass."""
    sha256: str = ""
    """Digest of its Parquet file."""


@dataclass(frozen=True, kw_only=True)
class PieceRecord(Written):
    """Record of a finished piece."""

    name: str
    """The piece, e.g. `day=3/part-00007`; its Parquet file is that with `.parquet`."""
    raw_name: str
    """The raw file."""
    day: int
    """Its day."""
    index: int
    """Its position in the day."""
    start: int
    """Byte of the raw text at which its first line starts."""
    end: int
    """Byte after its last line."""
    last: bool
    """Whether the raw file's text ends with it."""
    num_lines: int
    """Lines read, good and bad."""
    num_rejects: Mapping[str, int]
    """Bad lines by reason."""

    @property
    def num_rows(self) -> int:
        """Good lines."""
        return sum(self.row_groups)

    def write(self, folder: Path) -> None:
        """Commit the piece."""
        with durable_file(record_path(folder, self.name)) as stream:
            stream.write(json.dumps(asdict(self), indent=1, sort_keys=True).encode())

    @classmethod
    def read(cls, path: Path) -> "PieceRecord":
        """Read a record."""
        raw: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**raw, "row_groups": tuple(raw["row_groups"])})


def piece_name(day: int, index: int) -> str:
    """Name of a piece of a data set."""
    return f"day={day}/part-{index:05d}"


def record_path(folder: Path, name: str, suffix: str = ".json") -> Path:
    """Path of a piece's record in the folder of its pass."""
    return folder / (name.replace("/", "-") + suffix)


def read_records(folder: Path) -> dict[str, PieceRecord]:
    """The records of a pass, by name."""
    records = [PieceRecord.read(path) for path in sorted(folder.glob("*.json"))]
    return {record.name: record for record in records}


def stored_bytes(paths: Iterable[Path]) -> int | None:
    """Size of the files together, or None if one of them is not there."""
    try:
        return sum(path.stat().st_size for path in paths)
    except FileNotFoundError:
        return None


class DigestFile:
    """A file for writing that computes the SHA-256 and the size of its bytes."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        self.closed = False
        self.failure: OSError | None = None
        """The error of a failed write, which a library may wrap in another one."""

    def write(self, data: bytes) -> int:
        """Append `data`."""
        self._digest.update(data)
        with self._noting_failure():
            self._stream.write(data)
        self.num_bytes += len(data)
        return len(data)

    def tell(self) -> int:
        """Bytes written."""
        return self.num_bytes

    def flush(self) -> None:
        """Flush buffers to the kernel."""
        with self._noting_failure():
            self._stream.flush()

    def close(self) -> None:
        """Mark the end of the data; `durable_file` closes the file itself."""
        self.closed = True

    def readable(self) -> bool:
        """No."""
        return False

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """No."""
        return False

    @property
    def sha256(self) -> str:
        """Hex digest of what was written."""
        return self._digest.hexdigest()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = error
            raise


@contextmanager
def durable_file(path: Path) -> Iterator[DigestFile]:
    """Write a file atomically and durably.

    Raises:
        OSError: the write failed, even if a library raised another type of error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    written: DigestFile | None = None
    try:
        with temporary.open("wb") as stream:
            written = DigestFile(stream)
            yield written
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        renamed = isinstance(error, Exception) and not isinstance(error, OSError)
        if renamed and written is not None and written.failure is not None:
            raise written.failure from error
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_leftovers(out: Path) -> None:
    """Remove temporary files of killed processes from the output folder."""
    for path in out.rglob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)
