"""Commits pieces of work: the files of a piece are synced and renamed, then its record.

A record is a small JSON file. A piece with a record is finished and never repeated, unless its files were
removed meanwhile. Files without a record do not count, whenever their writer was killed.
"""

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, Final

from data.jobs.files import durable_file
from data.jobs.location import Location

RECORDS_AT_ONCE: Final = 8


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a task after a block; one that runs again, since its worker died, starts anew."""

    stored_position: int
    """Bytes of the raw file, as stored, that have been read."""
    num_lines: int
    """Lines that the task has read, good and bad."""
    num_bad: int
    """Bad lines of these."""


Report = Callable[[Progress], object]


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

    def write(self, folder: Location) -> None:
        """Commit the piece."""
        with durable_file(record_path(folder, self.name)) as stream:
            stream.write(json.dumps(asdict(self), indent=1, sort_keys=True).encode())

    @classmethod
    def read(cls, stored: Location) -> "PieceRecord":
        """Read a record."""
        raw: dict[str, Any] = json.loads(stored.read())
        return cls(**{**raw, "row_groups": tuple(raw["row_groups"])})


def piece_name(day: int, index: int) -> str:
    """Name of a piece of a data set."""
    return f"day={day}/part-{index:05d}"


def record_path(folder: Location, name: str, suffix: str = ".json") -> Location:
    """Location of a piece's record in the folder of its pass."""
    return folder / (name.replace("/", "-") + suffix)


def read_records(folder: Location) -> dict[str, PieceRecord]:
    """The records of a pass, by name."""
    with ThreadPoolExecutor(RECORDS_AT_ONCE) as threads:  # a record is a request to a store
        names = [name for name in folder.names() if name.endswith(".json")]
        records = list(threads.map(lambda name: PieceRecord.read(folder / name), names))
    return {record.name: record for record in records}
