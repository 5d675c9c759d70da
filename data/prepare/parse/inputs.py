"""Finds the raw files and their days, and splits them into pieces.

Files named `day_N` (Terabyte, also `day_N.gz`, `day_N.zst`) hold that day. One file without a day in its name
(Kaggle's train.txt) is split into `num_days` equal contiguous parts by its stored bytes, which are compressed
bytes for a compressed file (detected by its first bytes); a line belongs to the part in which it starts.
Several files without days in their names count as one day each, in the given order.

A piece is the unit of work, of commits and of output: about 64 MiB of raw text of one day of one file,
written as one Parquet file. Any process can read any range of a plain file; a compressed file is one stream,
which one process reads from its start.
"""

import codecs
import hashlib
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from data.criteo import NUM_FIELDS
from data.jobs.location import Location
from data.prepare.parse.lines import judge_line
from data.text.content import codec_of, open_content

PIECE_BYTES: Final = 64 << 20
"""Raw text in a piece, at most (a compressed file: at least, but for the last of a day)."""

DEFAULT_DAYS: Final = 7
"""Days of a single file without a day in its name: Criteo Kaggle covers seven."""

_DAY_NAME: Final = re.compile(r"day_(\d+)(?:\.(?:tsv|txt|csv))?(?:\.(?:gz|zst))?")
_HEAD_BYTES: Final = 1 << 20
_LOOK_BYTES: Final = 64 << 10
_GOOD_SHARE_NEEDED: Final = 0.5


@dataclass(frozen=True, kw_only=True)
class RawFile:
    """A raw file with its days."""

    path: Location
    """The file."""
    num_bytes: int
    """Its size as stored."""
    first_day: int
    """The day it holds, or the first of them."""
    num_days: int
    """Days it is cut into."""
    head_sha256: str
    """Digest of its first MiB, which detects a changed file of equal name and size."""
    compressed: bool
    """Whether it can only be read from its start."""

    @property
    def identity(self) -> dict[str, Any]:
        """Properties that must be equal to continue a job: name, size, head and days, not the folder."""
        return {
            "name": self.path.name,
            "num_bytes": self.num_bytes,
            "head_sha256": self.head_sha256,
            "first_day": self.first_day,
            "num_days": self.num_days,
        }

    @property
    def day_starts(self) -> list[int]:
        """Stored bytes at which its days start."""
        return [day * self.num_bytes // self.num_days for day in range(self.num_days)]


@dataclass(frozen=True, kw_only=True)
class Span:
    """Work for one process: a piece of a plain file, or all pieces of a compressed one."""

    raw: RawFile
    """The file."""
    start: int = 0
    """First byte; the span's lines start at or after it. Always 0 for a compressed file."""
    end: int | None = None
    """The span's lines start before this byte. None for a compressed file: up to its end."""
    day: int = 0
    """Day of the piece; a compressed file's pieces find theirs as it is read."""
    index: int = 0
    """Position of the piece in its day."""


def find_inputs(paths: Sequence[Location], num_days: int | None) -> tuple[RawFile, ...]:
    """Inspect the raw files and sort them by time.

    Args:
        paths: the files.
        num_days: days to cut a single file into that has no day in its name; None for the default.

    Raises:
        ValueError: a file is missing, empty, given twice or not Criteo's format, or the days do not add up.
    """
    for path in paths:
        size = path.size()
        if size is None:
            raise ValueError(f"{path} is not a file; give the raw Criteo files themselves")
        if size == 0:
            raise ValueError(f"{path} is empty; download it again or leave it out")
    names = [path.name for path in paths]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{twice[0]} is given more than once; input files need different names")
    days = [day_of(path) for path in paths]
    if None in days and any(day is not None for day in days):
        raise ValueError("some files are named day_N and some are not; prepare them into separate folders")
    if num_days is not None and (len(paths) > 1 or days[0] is not None):
        raise ValueError("--days cuts a single file that is not named day_N; leave it out here")
    if None not in days and len(set(days)) < len(days):
        raise ValueError("two files are of the same day; give one file a day")
    single = len(paths) == 1 and days[0] is None
    count = (num_days or DEFAULT_DAYS) if single else 1
    numbered = [(days[position] or 0, path) for position, path in enumerate(paths)]
    if days[0] is None:
        numbered = list(enumerate(paths))
    found = tuple(_look_at(path, day, count) for day, path in sorted(numbered))
    if num_days is not None:
        _refuse_fewer_lines(paths[0], num_days)
    return found


def plan(raw: RawFile) -> list[Span]:
    """The spans of a file, in order."""
    if raw.compressed:
        return [Span(raw=raw)]
    spans = []
    bounds = [*raw.day_starts, raw.num_bytes]
    for day in range(raw.num_days):
        start, size = bounds[day], bounds[day + 1] - bounds[day]
        num_pieces = -(-size // PIECE_BYTES)
        cuts = [start + size * piece // num_pieces for piece in range(num_pieces + 1)] if num_pieces else []
        spans += [
            Span(raw=raw, start=cuts[index], end=cuts[index + 1], day=raw.first_day + day, index=index)
            for index in range(num_pieces)
        ]
    return spans


def day_of(path: Location) -> int | None:
    """The day in a raw file's name; None if there is none."""
    match = _DAY_NAME.fullmatch(path.name)
    return int(match.group(1)) if match else None


def _look_at(path: Location, first_day: int, num_days: int) -> RawFile:
    with path.open() as stream:
        digest = hashlib.sha256(stream.read(_HEAD_BYTES)).hexdigest()
    raw = RawFile(
        path=path,
        num_bytes=path.size() or 0,
        first_day=first_day,
        num_days=num_days,
        head_sha256=digest,
        compressed=codec_of(path) is not None,
    )
    _refuse_another_format(raw)
    return raw


def _refuse_fewer_lines(path: Location, num_days: int) -> None:
    """Raise an error at the start if some days would have no line."""
    head = memoryview(bytearray(_LOOK_BYTES))
    num_lines, last_line_ends = 0, True
    with closing(open_content(path, [0])) as content:
        while num_lines < num_days and (size := content.readinto(head)):
            num_lines += bytes(head[:size]).count(b"\n")
            last_line_ends = head[size - 1] == ord("\n")
    num_lines += not last_line_ends
    if num_lines < num_days:
        raise ValueError(f"--days {num_days:,}: {path} has only {num_lines:,} lines; give fewer days")


def _refuse_another_format(raw: RawFile) -> None:
    """Raise an error at the start if a file does not hold labelled Criteo lines."""
    head = memoryview(bytearray(_LOOK_BYTES))
    with closing(open_content(raw.path, [0])) as content:
        lines = bytes(head[: content.readinto(head)]).removeprefix(codecs.BOM_UTF8).split(b"\n")
    if content.damage and not any(lines):
        raise ValueError(f"{raw.path} cannot be decompressed: {content.damage}")
    lines = [line.removesuffix(b"\r") for line in (lines[:-1] or lines)]
    good = sum(judge_line(line) is None for line in lines)
    if good >= _GOOD_SHARE_NEEDED * len(lines):
        return
    hint = ""
    if sum(line.count(b"\t") == NUM_FIELDS - 2 for line in lines) > len(lines) // 2:
        hint = (
            " They have 39 fields, not 40: this looks like Kaggle's test.txt, without labels; use train.txt."
        )
    raise ValueError(
        f"{raw.path} is not in Criteo's format: {len(lines) - good} of its first {len(lines)} lines are bad. "
        f"A line is a label (0 or 1), 13 integers and 26 hexadecimal categories, separated by tabs.{hint}"
    )
