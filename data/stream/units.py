"""Units of a folder's files, and those of a partition in order."""

import json
import zlib
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from data.stream.source import FoundUnit, Place


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
    """What was added, in that order."""
    reached: str = ""
    """The unit that was read last."""
    late: int = 0
    """Records of units that came after later ones were read, until they are asked for."""
    begun: str | None = None
    """The unit at which reading began, once that is known."""
    gone: int = 0
    """Records that were read before reading began here, and were not there then."""

    def resume(self, place: Place, counted: int) -> int:
        """Note where reading begins; returns how many records before it are not among `counted` ones."""
        self.begun = place.unit
        self.reached = max(self.reached, place.unit)
        more = self.before(place) - counted
        self.gone = max(0, -more)
        return max(0, more)

    def is_late(self, unit: str) -> bool:
        """Whether a unit that has just come is older than the one that was read last."""
        return unit < self.reached and unit not in self

    def pass_over(self, unit: str, num_records: int) -> int:
        """Count the records of a late unit, but for those that were read before; returns how many."""
        if self.begun is not None and unit < self.begun:
            read = min(self.gone, num_records)
            self.gone -= read
            num_records -= read
        self.late += num_records
        return num_records

    def add(self, unit: str, num_records: int) -> None:
        """Add a unit at its place in the order; if it is there, it has at least so many records."""
        at = bisect_left(self.units, unit)
        begin = self.ends[at - 1] if at else 0
        if self.units[at : at + 1] != [unit]:
            self.units.insert(at, unit)
            self.ends.insert(at, begin)
        if (more := begin + num_records - self.ends[at]) > 0:
            self.ends[at:] = [end + more for end in self.ends[at:]]
            self.found.append(FoundUnit(unit, num_records))

    def __contains__(self, unit: str) -> bool:
        """Whether a unit was added."""
        at = bisect_left(self.units, unit)
        return self.units[at : at + 1] == [unit]

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


class UnreadUnits:
    """Units that have come to a partition, from a place on, as part of a position.

    By them, a run that continues at the position notices which files have gone since.

    Args:
        encoded: see `encoded`.
    """

    def __init__(self, encoded: bytes = b"") -> None:
        text = zlib.decompress(encoded) if encoded else b"[]"
        self._units = [FoundUnit(*each) for each in json.loads(text)]
        self._encoded, self._num_encoded, self._is_new = encoded, len(self._units), False

    def add(self, found: Iterable[FoundUnit]) -> None:
        """Add units; one may come again if more records were found in it."""
        for each in found:
            insort(self._units, each)
            self._is_new = True

    def since(self, place: Place) -> list[FoundUnit]:
        """Units from that of `place` on."""
        return self._units[self._begin(place) :]

    def encoded(self, place: Place) -> bytes:
        """Units from that of `place` on, and some before it; empty without any.

        Positions are saved at each step, and the same bytes cost nothing there: units that were read stay in
        them as long as they are fewer than those that were not.
        """
        if self._is_new or 2 * (len(self._units) - self._begin(place)) <= self._num_encoded:
            self._units = self.since(place)
            self._encoded = zlib.compress(json.dumps(self._units).encode(), 1) if self._units else b""
            self._num_encoded, self._is_new = len(self._units), False
        return self._encoded

    def _begin(self, place: Place) -> int:
        return bisect_left(self._units, (place.unit,))
