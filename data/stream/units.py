"""Units of a folder's files, and those of a partition in order."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from data.stream.source import Place


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
    reached: str = ""
    """The unit that was read last."""
    late: int = 0
    """Records of units that came after later ones were read, until they are asked for."""
    is_resumed: bool = False
    """Whether it is known where reading began."""

    def resume(self, place: Place, counted: int) -> int:
        """Note where reading begins; returns how many records before it are not among `counted` ones."""
        self.is_resumed = True
        self.reached = max(self.reached, place.unit)
        return max(0, self.before(place) - counted)

    def add(self, unit: str, num_records: int) -> None:
        """Add a unit at its place in the order; if it is there, it has at least so many records."""
        at = bisect_left(self.units, unit)
        begin = self.ends[at - 1] if at else 0
        if self.units[at : at + 1] != [unit]:
            self.units.insert(at, unit)
            self.ends.insert(at, begin)
        more = max(0, begin + num_records - self.ends[at])
        self.ends[at:] = [end + more for end in self.ends[at:]]

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
