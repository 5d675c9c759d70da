"""A stream in memory, whose records are numbers."""

from collections.abc import Mapping, Sequence

import numpy as np

from data.dataset import DatasetManifest, Feature
from data.loader.columns import Column, Rows
from data.stream.backlog import shares_of
from data.stream.source import Checked, Fetched, FoundUnit, Known, Place

MANIFEST = DatasetManifest(features=(Feature(name="item", rows=1 << 40),), parts=(), dense=("price",))


class MemoryStream:
    """Partitions that grow by `arrive`, in units of so many records; the id of each record is unique."""

    identity = "memory"

    def __init__(self, num_partitions: int, unit_records: int = 1 << 40) -> None:
        self.partitions = tuple(f"p{number}" for number in range(num_partitions))
        self._unit_records = unit_records
        self.lengths = dict.fromkeys(self.partitions, 0)
        self.bad: set[int] = set()
        self.closed = False

    def arrive(self, partition: str, count: int) -> None:
        self.lengths[partition] += count

    def id_of(self, partition: str, number: int) -> int:
        return self.partitions.index(partition) << 24 | number

    @property
    def ids(self) -> set[int]:
        return {self.id_of(name, each) for name, length in self.lengths.items() for each in range(length)}

    def number(self, place: Place) -> int:
        return int(place.unit or 0) * self._unit_records + place.record

    def place(self, number: int) -> Place:
        return Place(f"{number // self._unit_records:06d}", number % self._unit_records)

    def fetch(self, places: Mapping[str, Place], at_most: int) -> Fetched | None:
        found = [(self.number(place), name) for name, place in places.items() if self.waiting(name, place)]
        if not found:
            return None
        number, name = min(found)
        begin = self.place(number)
        end = min(number + at_most, self.lengths[name], number + self._unit_records - begin.record)
        numbers = np.arange(number, end)
        is_bad = np.array([self.id_of(name, each) in self.bad for each in numbers.tolist()], bool)
        records = numbers - number + begin.record
        ids = np.array([self.id_of(name, each) for each in numbers.tolist()], np.int64)
        checked = Checked(
            rows=rows_of(ids[~is_bad]) if (~is_bad).any() else None,
            records=records[~is_bad],
            bad={each: f"{each} is bad" for each in records[is_bad].tolist()},
        )
        return Fetched(
            partition=name, begin=begin, end=begin.record + len(numbers), checked=checked, arrived_s=0.0
        )

    def waiting(self, partition: str, place: Place) -> int:
        return self.lengths[partition] - self.number(place)

    is_quiet = True

    def shares(self, places: Mapping[str, Place], limit: int, *, newest: bool) -> dict[str, int]:
        return shares_of(limit, {name: self.waiting(name, place) for name, place in places.items()})

    def skip(self, partition: str, place: Place, count: int) -> tuple[Place, int]:
        begin = self.number(place)
        end = min(begin + count, self.lengths[partition])
        return (self.place(end) if end > begin else place), end - begin

    def found(self, partition: str, since: int) -> Sequence[FoundUnit]:
        return ()

    def expect(self, partition: str, place: Place, known: Known) -> None:
        assert not known.units

    def where(self, partition: str, place: Place) -> str:
        return f"{partition}, record {place.record}"

    def close(self) -> None:
        self.closed = True


def rows_of(ids: np.ndarray) -> Rows:
    return Rows(
        label=Column((ids % 2).astype(np.float32)),
        dense=(Column(ids.astype(np.float32)),),
        ids=(Column(ids),),
        weights=(None,),
    )


def ids_of(pieces: Sequence[Rows]) -> list[int]:
    return [each for piece in pieces for each in piece.ids[0].values.tolist()]
