"""A folder in which files arrive, as a stream.

Files are read in the order in which they were written. Pieces of a Parquet file, and whole files of other
formats, belong to one of 64 partitions each, so that ranks share the work.
"""

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa

from data.criteo import PREPARE
from data.dataset import DatasetManifest, without_password
from data.jobs.location import Location
from data.stream.files import FileReader, GoneError, Piece
from data.stream.listing import PATIENCE_S, FolderListing, NewFile, WarnOnce
from data.stream.records import LONGEST_REASON, RecordReader
from data.stream.source import Checked, Fetched, FoundUnit, Known, Place
from data.stream.units import PartitionUnits, Unit

logger = logging.getLogger(__name__)

NUM_PARTITIONS: Final = 64
UNREADABLE: Final = (pa.ArrowException, OSError, ValueError, pl.exceptions.PolarsError)
"""Errors of a file that is not what its name says, or that cannot be reached."""


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
        self._folder = Location.of(uri).absolute()
        if self._folder.local is not None and self._folder.local.is_file():
            raise ValueError(f"{uri} is a file: name the folder in which files arrive")
        records = RecordReader(dataset, manifest, is_encoded)
        is_criteo = manifest.provenance.get("maker") == PREPARE and not is_encoded
        self._reader = FileReader(self._folder, records, is_criteo=is_criteo)
        self._listing = FolderListing(self._folder, now)
        self._warn_once = WarnOnce()
        self.partitions = tuple(f"{number:02d}" for number in range(NUM_PARTITIONS))
        self.identity = f"folder {without_password(uri).rstrip('/').rpartition('/')[2]}"
        self._by_name = {name: PartitionUnits() for name in self.partitions}
        self._written_ns: dict[str, int] = {}
        """Newest times of files that have come, by their paths."""
        self._unreadable: dict[str, str] = {}
        """Why files are left out, by the units of one bad record that stand for them."""
        self._is_first = True
        self._failing_s: dict[NewFile, float] = {}
        """Since when files cannot be read, by the monotonic clock."""

    @property
    def is_quiet(self) -> bool:
        """Whether all files that are there were found; see `StreamSource.is_quiet`."""
        return self._listing.is_quiet

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
        file = NewFile(*Unit.of(place.unit)[:2])
        self._by_name[name].reached = place.unit
        end = min(place.record + at_most, size)
        try:
            checked, end = self._read(place, end)
            self._failing_s.pop(file, None)
        except (GoneError, *UNREADABLE) as error:
            if isinstance(error, GoneError) or self._reader.is_gone(place.unit):
                if not self._listing.has_lost(file):
                    return None
                bad: dict[int, str] = {}
                self._warn_once(
                    self._folder / file.path,
                    "was deleted, renamed or replaced before all of it was read: the rest of its records is "
                    "left out, and counted so. What comes under another name, or with another time, is new",
                )
            elif isinstance(error, OSError) and (self._is_first or self._is_momentary(file, error)):
                return None  # before the folder is listed, its storage may be away as a whole
            else:
                bad = dict.fromkeys(range(place.record, size), _reason(error))
            checked, end = _without_rows(bad), size
        arrived_s = Unit.of(place.unit).written_ns / 1e9
        return Fetched(partition=name, begin=place, end=end, checked=checked, arrived_s=arrived_s)

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
        of.reached = max(of.reached, last.unit)
        return Place(last.unit, last.record + 1), end - begin

    def found(self, partition: str, since: int) -> Sequence[FoundUnit]:
        """Pieces of files; see `StreamSource.found`."""
        return self._by_name[partition].found[since:]

    def expect(self, partition: str, place: Place, known: Known) -> None:
        """See `StreamSource.expect`; `fetch` finds out, and tells, whose file is gone."""
        self._by_name[partition].expect(place, known)
        units = [Unit.of(each.unit) for each in known.units if not each.is_late]
        for unit in units:  # other partitions may know other times of a file
            self._written_ns[unit.path] = max(unit.written_ns, self._written_ns.get(unit.path, 0))
        self._listing.expect(NewFile(*unit[:2]) for unit in units if unit.name >= place.unit)

    def where(self, partition: str, place: Place) -> str:
        """The file, and the row in it or in its row group; see `StreamSource.where`."""
        unit = Unit.of(place.unit)
        if place.unit in self._unreadable:
            return unit.path
        group = f"row group {unit.group}, " if unit.group else ""
        return f"{unit.path}, {group}row {unit.begin + place.record:,}"

    def close(self) -> None:
        """Close the file that is being read."""
        self._reader.close()

    def _list(self) -> None:
        """Find new files."""
        files = self._listing.new_files()
        if files is None:
            return
        for number, file in enumerate(files):
            try:
                pieces = list(self._reader.pieces(file.path))
                self._failing_s.pop(file, None)
            except UNREADABLE as error:
                if isinstance(error, OSError) and self._is_momentary(file, error):
                    self._listing.put_off(files[number:])  # so that later ones do not overtake it
                    return
                pieces = [Piece(0, 0, 1)]
                self._unreadable[Unit(*file).name] = _reason(error)
            self._add(file, pieces)
        self._is_first = False

    def _add(self, file: NewFile, pieces: Iterable[Piece]) -> None:
        """Add a file's units to their partitions."""
        place = self._folder / file.path
        if self._written_ns.get(file.path, file.written_ns) != file.written_ns:
            self._warn_once(
                place,
                "has changed since it was found: all its records count as new. Write files under a name "
                "that ends in .tmp, and rename them when they are whole",
            )
        first, is_late = zlib.crc32(file.path.encode()), False
        for number, (group, begin, num_records) in enumerate(pieces):
            if not num_records:
                continue
            name = self.partitions[(first + number) % NUM_PARTITIONS]
            if self._by_name[name].come(Unit(*file, group, begin).name, num_records):
                is_late = True
            else:
                self._written_ns[file.path] = file.written_ns
        if is_late:
            self._warn_once(
                place,
                "is older than files that were read already: some or all of its records are not trained, and "
                "count as left out. To have all of them trained, again or for the first time, give it the "
                "present time (`touch`)",
            )

    def _read(self, place: Place, end: int) -> tuple[Checked, int]:
        """Read records of a unit up to about `end`; with the number of the record after them."""
        if place.unit in self._unreadable:
            return _without_rows(dict.fromkeys(range(place.record, end), self._unreadable[place.unit])), end
        return self._reader.read(place, end)

    def _is_momentary(self, file: NewFile, error: OSError) -> bool:
        """Whether a file that cannot be read is to be tried again."""
        if file not in self._failing_s:
            self._failing_s[file] = time.monotonic()
            logger.warning("%s cannot be read, and is tried again: %s", self._folder / file.path, error)
        return time.monotonic() - self._failing_s[file] < PATIENCE_S


def _without_rows(bad: Mapping[int, str]) -> Checked:
    return Checked(rows=None, records=np.empty(0, np.int64), bad=bad)


def _reason(error: Exception) -> str:
    return f"cannot be read: {error}"[:LONGEST_REASON]
