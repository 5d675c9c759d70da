"""A folder in which files arrive, as a stream.

Files are read in the order in which they were written. Pieces of a Parquet file, and whole files of other
formats, belong to one of 64 partitions each, so that ranks share the work.
"""

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Final, NamedTuple

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from pyarrow import fs

from data.convert.read.files import format_of, input_file
from data.criteo import PREPARE
from data.dataset import DatasetManifest, without_password
from data.jobs.location import Location
from data.stream.records import LONGEST_REASON, RecordReader, criteo_rows
from data.stream.source import Checked, Fetched, Place
from data.stream.units import PartitionUnits, Unit
from data.text.content import open_content
from data.text.streams import LineReader

logger = logging.getLogger(__name__)

NUM_PARTITIONS: Final = 64
SETTLE_S: Final = 3.0
"""Age of a file from which it is read: until then it may be written to, and others may appear that were
written before it."""
LIST_EVERY_S: Final = 1.0
PIECE_RECORDS: Final = 4096
"""Records of a row group that belong to one partition."""
PATIENCE_S: Final = 60.0
"""Time for which a file that cannot be read is tried again."""
BLOCK_BYTES: Final = 1 << 18
CRITEO: Final = "criteo"
"""Format of files without a known ending, where the data set was made of Criteo's logs."""


class _GoneError(Exception):
    """A file is not what it was when it was found."""


class _Block(NamedTuple):
    """Consecutive records of a file that is no Parquet."""

    frame: pl.DataFrame
    records: NDArray[np.int64]
    """Numbers of the frame's rows, from 0."""
    end: int
    """Number of the record after the block."""
    bad: dict[int, str]


class FolderStream:
    """Records of files that arrive in a folder, on any pyarrow filesystem.

    A file is Parquet, CSV, TSV or JSON lines (these compressed or not), or one of Criteo's logs; its columns
    are those of the data set, or of the raw rows that it was made of. Names that begin with a dot or an
    underscore, and those that end in `.tmp`, are passed over.

    Args:
        uri: the folder, which may not exist yet.
        manifest: of the data set.
        dataset: its URI.
        is_encoded: as for `RecordReader`.
        now: the time in seconds.

    Raises:
        ValueError: there is a file instead of a folder, or records are raw and the data set does not say how
            they are encoded.
    """

    def __init__(
        self,
        uri: str,
        manifest: DatasetManifest,
        dataset: str,
        *,
        is_encoded: bool,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._now = Location.of(uri).absolute(), now
        if self._folder.local is not None and self._folder.local.is_file():
            raise ValueError(f"{uri} is a file: name the folder in which files arrive")
        self._records = RecordReader(dataset, manifest, is_encoded)
        self._is_criteo = manifest.provenance.get("maker") == PREPARE and not is_encoded
        self.partitions = tuple(f"{number:02d}" for number in range(NUM_PARTITIONS))
        self.identity = f"folder {without_password(uri).rstrip('/').rpartition('/')[2]}"
        self._by_name = {name: PartitionUnits() for name in self.partitions}
        self._known: set[tuple[str, int]] = set()
        self._added: set[str] = set()
        self._unreadable: dict[str, str] = {}
        """Why files are left out, by the units of one bad record that stand for them."""
        self._told: set[str] = set()
        """Messages that are logged once."""
        self._listed_s = self._warned_s = -np.inf
        self.is_quiet = False
        self._is_first = True
        self._failing: tuple[str, float] | None = None
        self._table: tuple[str, pa.Table] | None = None
        self._text: tuple[Place, Iterator[_Block]] | None = None

    def fetch(self, places: Mapping[str, Place], at_most: int) -> Fetched | None:
        """Read records of the oldest file; see `StreamSource.fetch`."""
        self._list()
        found = [
            (*partition.at(number), name)
            for name, place in places.items()
            if (number := (partition := self._by_name[name]).before(place)) < partition.num_records
        ]
        if not found:
            return None
        place, size, name = min(found)
        self._by_name[name].reached = place.unit
        end = min(place.record + at_most, size)
        try:
            checked, end = self._read(place, end)
        except (_GoneError, pa.ArrowException, OSError, ValueError, pl.exceptions.PolarsError) as error:
            if isinstance(error, _GoneError) or self._is_gone(place.unit):
                bad: dict[int, str] = {}
                self._tell_once(
                    self._file(place.unit),
                    "was deleted or replaced before all of it was read: the rest of its records is left out, "
                    "and counted so. If there is another file of this name, all its records count as new",
                )
            elif self._may_recover(place.unit, error):
                return None
            else:
                bad = dict.fromkeys(range(place.record, size), _reason(error))
            checked, end = _without_rows(bad), size
        self._failing = None
        arrived_s = Unit.of(place.unit).written_ns / 1e9
        return Fetched(partition=name, begin=place, end=end, size=size, checked=checked, arrived_s=arrived_s)

    def waiting(self, partition: str, place: Place) -> int:
        """Records from `place` on that have come."""
        self._list()
        of = self._by_name[partition]
        return of.num_records - of.before(place)

    def shares(self, places: Mapping[str, Place], limit: int, *, newest: bool) -> dict[str, int]:
        """By the times of files; see `StreamSource.shares`."""
        left = [
            (unit, count, name)
            for name, place in places.items()
            for unit, count in self._by_name[name].after(place)
        ]
        found = dict.fromkeys(places, 0)
        for _, count, name in sorted(left, reverse=newest):
            found[name] += min(count, limit)
            limit -= min(count, limit)
        return found

    def skip(self, partition: str, place: Place, count: int) -> tuple[Place, int]:
        """The place after the next records; see `StreamSource.skip`."""
        of = self._by_name[partition]
        begin = of.before(place)
        end = min(begin + count, of.num_records)
        if end == begin:
            return place, 0
        last, _ = of.at(end - 1)
        return Place(last.unit, last.record + 1), end - begin

    def passed_over(self, partition: str, place: Place, *, counted: int, size: int) -> int:
        """Records of files that have come late; see `StreamSource.passed_over`."""
        self._list()
        of = self._by_name[partition]
        late, of.late = of.late, 0
        if self._is_first or of.is_resumed:
            return late
        if place.record < size:
            of.add(place.unit, size)  # also if its file is gone: `fetch` finds out, and tells
        if unseen := of.resume(place, counted):
            self._tell_once(
                self._folder,
                "has files that came while no run was reading, and are older than others that were read: "
                "their records are left out, and counted so. To have such files trained, give them the "
                "present time (`touch`)",
            )
        return late + unseen

    def where(self, partition: str, place: Place) -> str:
        """The file, and the row in it or in its row group; see `StreamSource.where`."""
        unit = Unit.of(place.unit)
        if place.unit in self._unreadable:
            return unit.path
        group = f"row group {unit.group}, " if unit.group else ""
        return f"{unit.path}, {group}row {unit.begin + place.record:,}"

    def close(self) -> None:
        """Close the file that is being read."""
        self._table = self._text = None

    def _list(self) -> None:
        """Find new files."""
        if time.monotonic() - self._listed_s < LIST_EVERY_S:
            return
        selector = fs.FileSelector(self._folder.path, recursive=True)
        self.is_quiet = False
        try:
            infos = self._folder.filesystem.get_file_info(selector)
        except OSError as error:
            self._listed_s = time.monotonic()
            if time.monotonic() - self._warned_s >= PATIENCE_S:
                self._warned_s = time.monotonic()
                is_absent = isinstance(error, FileNotFoundError)
                problem = "is not there yet" if is_absent else f"cannot be listed ({error})"
                logger.warning("%s %s: looking again every second", self._folder, problem)
            return
        is_quiet = True
        for written_ns, path in sorted(self._files(infos)):
            if (path, written_ns) in self._known or _is_passed_over(path):
                continue
            age_s = self._now() - written_ns / 1e9
            if age_s < -PATIENCE_S:  # not by the skew of two clocks
                self._tell_once(
                    self._folder / path,
                    "has a time in the future, and is not read until then: give it the present one (`touch`)",
                )
                continue
            if age_s < SETTLE_S:
                is_quiet = False
                continue
            if self._is_other_name(path):
                self._known.add((path, written_ns))
                continue
            try:
                pieces = list(self._pieces(self._folder / path, path))
            except (pa.ArrowException, OSError, ValueError, pl.exceptions.PolarsError) as error:
                if isinstance(error, OSError) and age_s < PATIENCE_S:
                    is_quiet = False
                    continue  # perhaps a store that cannot be reached for a moment
                pieces = [(0, 0, 1)]
                self._unreadable[Unit(written_ns, path).name] = _reason(error)
            self._add(path, written_ns, pieces)
            self._known.add((path, written_ns))
        self._is_first, self.is_quiet = False, is_quiet
        self._listed_s = time.monotonic()

    def _files(self, infos: Iterable[fs.FileInfo]) -> Iterator[tuple[int, str]]:
        """Times of files in nanoseconds, and their paths in the folder."""
        start = len(self._folder.path.rstrip("/")) + 1
        for info in infos:
            try:
                if info.is_file:
                    yield info.mtime_ns, info.path[start:]
            except UnicodeDecodeError as error:
                what = "has a file that is not read, as its name is not UTF-8"
                self._tell_once(self._folder, f"{what}: {error.object!r}")

    def _is_other_name(self, path: str) -> bool:
        """Whether a link on a path leads to what is in the folder, and found there under its own name."""
        if self._folder.local is None:
            return False
        folder = self._folder.local.resolve()
        for name in (path, *map(str, PurePosixPath(path).parents)):
            own = (folder / name).resolve()
            if own == folder / name or not own.is_relative_to(folder):
                continue
            # hidden files are not read themselves: a link to one is how some writers publish it
            if not _is_passed_over(str(own.relative_to(folder))) or own == folder:
                self._tell_once(
                    self._folder, "has links to what is in it, which is read once, under its own name"
                )
                return True
        return False

    def _add(self, path: str, written_ns: int, pieces: Iterable[tuple[int, int, int]]) -> None:
        """Add a file's units to their partitions; `pieces` are those of `_pieces`."""
        place = self._folder / path
        if path in self._added:
            logger.warning(
                "%s has changed since it was found: all its records count as new. Write files under a name "
                "that ends in .tmp, and rename them when they are whole",
                place,
            )
        first, late = zlib.crc32(path.encode()), 0
        for number, (group, begin, num_records) in enumerate(pieces):
            unit = Unit(written_ns, path, group, begin).name
            name = self.partitions[(first + number) % NUM_PARTITIONS]
            partition = self._by_name[name]
            if not self._is_first and unit < partition.reached:
                partition.late += num_records
                late += num_records
            elif num_records:
                partition.add(unit, num_records)
                self._added.add(path)
        if late:
            logger.warning(
                "%s: %s records are not trained, as the file is older than others that were read already; to "
                "have them trained, give it the present time (`touch`)",
                place,
                f"{late:,}",
            )

    def _pieces(self, place: Location, path: str) -> Iterator[tuple[int, int, int]]:
        """Row group, first row in it, and number of records of each unit of a file."""
        kind = self._format(path)
        if self._records.is_encoded and kind != "parquet":
            raise ValueError(f"encoded records (stream.rows) come as Parquet, and this is {kind}")
        if kind == "parquet":
            with place.open() as stream:
                metadata = pq.ParquetFile(stream).metadata
            for group in range(metadata.num_row_groups):
                num_rows = metadata.row_group(group).num_rows
                for begin in range(0, num_rows, PIECE_RECORDS):
                    yield group, begin, min(PIECE_RECORDS, num_rows - begin)
            return
        *_, num_records = [0, *(block.end for block in self._blocks(path, 0))]
        yield 0, 0, num_records

    def _format(self, path: str) -> str:
        """Format of a file, by its name."""
        try:
            return format_of(self._folder / path)
        except ValueError:
            if not self._is_criteo:
                raise
            return CRITEO

    def _read(self, place: Place, end: int) -> tuple[Checked, int]:
        """Read records of a unit up to about `end`; with the number of the record after them."""
        if place.unit in self._unreadable:
            return _without_rows({0: self._unreadable[place.unit]}), end
        _, path, group, first = Unit.of(place.unit)
        name = str(self._folder / path)
        if self._format(path) != "parquet":
            block = self._next_block(place, path)
            if self._is_gone(place.unit):
                raise _GoneError
            checked = self._records.of_frame(block.frame, block.records, name)
            return replace(checked, bad={**block.bad, **checked.bad}), block.end
        table = self._group(place.unit, path, group)[first + place.record : first + end]
        records = np.arange(place.record, end)
        if self._records.is_encoded:
            return self._records.of_table(table, records, name), end
        frame = pl.from_arrow(table)
        assert isinstance(frame, pl.DataFrame)
        return self._records.of_frame(frame, records, name), end

    def _group(self, unit: str, path: str, group: int) -> pa.Table:
        """A row group, of which this rank reads all its pieces before the next one."""
        key = unit.rpartition("+")[0]
        if self._table is None or self._table[0] != key:
            self._table = None
            with (self._folder / path).open() as stream:
                table = pq.ParquetFile(stream, page_checksum_verification=True).read_row_group(group)
            if self._is_gone(unit):
                raise _GoneError
            self._table = key, table
        return self._table[1]

    def _is_gone(self, unit: str) -> bool:
        """Whether a unit's file is no more what was found.

        Under the same name there may be another one, whose records come with its own units.
        """
        try:
            (info,) = self._folder.filesystem.get_file_info([self._file(unit).path])
        except OSError:
            return False
        return not info.is_file or info.mtime_ns != Unit.of(unit).written_ns

    def _next_block(self, place: Place, path: str) -> _Block:
        """The block of a file that begins at `place`; goes on where the one before has ended."""
        if self._text is None or self._text[0] != place:
            self._text = place, self._blocks(path, place.record)
        block = next(self._text[1], None)
        if block is None:
            raise ValueError("it has fewer records than were found in it")
        self._text = Place(place.unit, block.end), self._text[1]
        return block

    def _blocks(self, path: str, skipped: int) -> Iterator[_Block]:
        """Records of a file after the first `skipped` ones."""
        place = self._folder / path
        if self._format(path) == CRITEO:
            yield from _criteo_blocks(place, skipped)
            return
        file = input_file(place, path, self._records.columns)
        for block in file.blocks(self._records.columns, skipped, BLOCK_BYTES):
            bad = {each.row - 1: each.reason for each in block.bad}
            end = 1 + max([*(block.rows - 1)[-1:].tolist(), *bad])
            yield _Block(block.frame, block.rows - 1, end, bad)

    def _may_recover(self, unit: str, error: Exception) -> bool:
        """Whether a file that could not be read is to be tried again."""
        if isinstance(error, FileNotFoundError) or not isinstance(error, OSError):
            return False
        since = self._failing[1] if self._failing and self._failing[0] == unit else time.monotonic()
        if self._failing is None or self._failing[0] != unit:
            logger.warning("%s cannot be read, and is tried again: %s", self._file(unit), error)
        self._failing = unit, since
        return time.monotonic() - since < PATIENCE_S

    def _file(self, unit: str) -> Location:
        return self._folder / Unit.of(unit).path

    def _tell_once(self, file: Location, what: str) -> None:
        message = f"{file} {what}"
        if message not in self._told:
            self._told.add(message)
            logger.warning("%s", message)


def _criteo_blocks(place: Location, skipped: int) -> Iterator[_Block]:
    """Lines of one of Criteo's logs after the first `skipped` ones."""
    with closing(open_content(place, [0])) as content:
        number = 0
        for text in LineReader(content, 0, BLOCK_BYTES).blocks(lambda: None):
            frame, bad_lines = criteo_rows(text)
            bad = {number + line.index: line.reason for line in bad_lines}
            num_lines = frame.height + len(bad)
            records = np.delete(np.arange(number, number + num_lines), [each - number for each in bad])
            number += num_lines
            if number <= skipped:
                continue
            left = records >= skipped
            bad = {each: reason for each, reason in bad.items() if each >= skipped}
            yield _Block(frame.filter(pl.Series(left)), records[left], number, bad)


def _without_rows(bad: Mapping[int, str]) -> Checked:
    return Checked(rows=None, records=np.empty(0, np.int64), bad=bad)


def _reason(error: Exception) -> str:
    return f"cannot be read: {error}"[:LONGEST_REASON]


def _is_passed_over(path: str) -> bool:
    """Whether a name is that of a file that is being written, or of bookkeeping."""
    parts = path.split("/")
    return any(part.startswith((".", "_")) for part in parts) or parts[-1].endswith(".tmp")
