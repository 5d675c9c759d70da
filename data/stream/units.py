"""Units of a folder's files, and those of a partition in order."""

import json
import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Self

from data.stream.source import FoundUnit, Known, Place

KEPT: Final = 4096
"""Units of a partition that a position keeps of those that were read."""
NOTHING: Final = Known()


class Unit(NamedTuple):
    """Consecutive rows of a file: of one row group if it is Parquet, else all."""

    written_ns: int
    """Time of the file, in nanoseconds of Unix time."""
    path: str
    """Of the file, in the folder."""
    group: int = 0
    """Row group."""
    begin: int = 0
    """First row in the row group."""

    @classmethod
    def of(cls, name: str) -> Self:
        """The unit of a name."""
        written, _, rest = name.partition(" ")
        path, _, piece = rest.rpartition("#")
        group, _, begin = piece.partition("+")
        return cls(int(written), path, int(group), int(begin))

    @property
    def name(self) -> str:
        """Names are part of saved positions, and ordered by the times of files."""
        return f"{self.written_ns:020d} {self.path}#{self.group:06d}+{self.begin:012d}"


@dataclass
class PartitionUnits:
    """The units of a partition in order, by their names."""

    units: list[str] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Records of all units up to each."""
    found: list[FoundUnit] = field(default_factory=list)
    """Those from `since` on that have come, in that order, with late ones."""
    late: set[str] = field(default_factory=set)
    """Those that are never read, as they came after later ones were read."""
    since: str = ""
    """All units before this one were read by earlier runs."""
    reached: str = ""
    """The unit that was read last."""

    def expect(self, place: Place, known: Known) -> None:
        """Continue at a place, with what is known to have come."""
        self.since, self.reached = known.since, max(self.reached, place.unit)
        self.found += [each for each in known.units if self._add(each)]

    def come(self, unit: str, num_records: int) -> bool:
        """Note that a unit is there; if it has come earlier, it has at least so many records.

        Returns:
            Whether it is late; if it comes again, no more.
        """
        if unit in self.late:
            return False
        at = bisect_left(self.units, unit)
        is_late = self.since <= unit < self.reached and self.units[at : at + 1] != [unit]
        found = FoundUnit(unit, num_records, is_late)
        if self._add(found) and unit >= self.since:
            self.found.append(found)
        return is_late

    def _add(self, found: FoundUnit) -> bool:
        """Add a unit; returns whether it, or some of its records, were not known."""
        unit, num_records, is_late = found
        if is_late:
            is_new = unit not in self.late
            self.late.add(unit)
            return is_new
        at = bisect_left(self.units, unit)
        begin = self.ends[at - 1] if at else 0
        if self.units[at : at + 1] != [unit]:
            self.units.insert(at, unit)
            self.ends.insert(at, begin)
        if (more := begin + num_records - self.ends[at]) > 0:
            self.ends[at:] = [end + more for end in self.ends[at:]]
        return more > 0

    def before(self, place: Place) -> int:
        """Records before a place."""
        at = bisect_left(self.units, place.unit)
        begin = self.ends[at - 1] if at else 0
        if at < len(self.units) and self.units[at] == place.unit:
            return min(begin + place.record, self.ends[at])
        return begin

    def at(self, number: int) -> tuple[Place, int]:
        """Place of a record by its number, and the end of its unit; there must be one."""
        unit = bisect_right(self.ends, number)
        begin = self.ends[unit - 1] if unit else 0
        return Place(self.units[unit], number - begin), self.ends[unit] - begin

    def after(self, place: Place) -> Iterator[tuple[str, int]]:
        """Units from a place on, with the records that are left of them."""
        begin = self.before(place)
        for unit in range(bisect_right(self.ends, begin), len(self.units)):
            yield self.units[unit], self.ends[unit] - max(begin, self.ends[unit - 1] if unit else 0)

    @property
    def num_records(self) -> int:
        """Of all units."""
        return self.ends[-1] if self.ends else 0


class KnownUnits:
    """Units that have come to a partition, as part of a position.

    By them, a run that continues at the position notices which files have gone since, and which come late.

    Args:
        known: what has come before.
    """

    def __init__(self, known: Known = NOTHING) -> None:
        self._units, self._since = list(known.units), known.since
        self._encoded: bytes | None = None

    @classmethod
    def decoded(cls, encoded: bytes) -> Self:
        """From what `encoded` gave."""
        since, units = json.loads(zlib.decompress(encoded))
        return cls(Known([FoundUnit(*each) for each in units], since))

    @property
    def known(self) -> Known:
        """What has come."""
        return Known(tuple(self._units), self._since)

    def add(self, found: Iterable[FoundUnit]) -> None:
        """Add units; one may come again if more records were found in it."""
        for each in found:
            insort(self._units, each)
            self._encoded = None

    def encoded(self, place: Place) -> bytes:
        """What has come, without all but the newest `KEPT` ones that were read; empty for nothing.

        Positions are saved at each step, where the same bytes cost nothing.
        """
        if self._encoded is None:
            num_read = bisect_left(self._units, (place.unit,))
            if num_read > KEPT:
                self._since = self._units[num_read - KEPT].unit
                del self._units[: num_read - KEPT]
            text = json.dumps([self._since, self._units]).encode()
            self._encoded = zlib.compress(text, 1) if self._units or self._since else b""
        return self._encoded
