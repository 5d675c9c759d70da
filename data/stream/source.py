"""What a stream is: partitions whose records come one after the other and keep their places.

`FolderStream` reads files as they arrive, `KafkaStream` a topic. `StreamLoader` makes batches of either.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from data.loader.columns import Rows


class Place(NamedTuple):
    """Where reading of a partition goes on; places of one partition are ordered as its records are."""

    unit: str = ""
    """File and row group; of Kafka, whose offsets count through the partition, empty."""
    record: int = 0
    """Number of the next record in the unit, from 0."""


START: Final = Place()


class FoundUnit(NamedTuple):
    """A unit of a partition that has come."""

    unit: str
    """As in `Place`."""
    num_records: int
    is_late: bool = False
    """Whether it is older than others that were read already: it is never read."""


class Known(NamedTuple):
    """Units that are known to have come to a partition."""

    units: Sequence[FoundUnit] = ()
    """In order."""
    since: str = ""
    """All units before this one have come earlier, also those that are not among `units`."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Records that were read and checked.

    Attributes:
        rows: those that can be trained, or None if there are none.
        records: their numbers in the unit, ascending int64 `[n]`.
        bad: why the others cannot, by their numbers.
    """

    rows: Rows | None
    records: NDArray[np.int64]
    bad: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fetched:
    """Consecutive records of one unit of a partition.

    Attributes:
        partition: which.
        begin: place of the first.
        end: number of the record after the last, in the same unit.
        checked: what became of them.
        arrived_s: when the first of them arrived, in seconds of Unix time.
    """

    partition: str
    begin: Place
    end: int
    checked: Checked
    arrived_s: float


class StreamSource(Protocol):
    """Gives the records of partitions, of which this rank reads some; one thread calls it at a time."""

    @property
    def identity(self) -> str:
        """What a saved position belongs to; not where it is reached."""
        ...

    @property
    def partitions(self) -> tuple[str, ...]:
        """Names of all partitions, the same on all ranks while they train."""
        ...

    @property
    def is_quiet(self) -> bool:
        """Whether the newest look at the stream has succeeded, and shown nothing that is about to come."""
        ...

    def fetch(self, places: Mapping[str, Place], at_most: int) -> Fetched | None:
        """Read about `at_most` of the oldest records of some partitions, each from its place on.

        Returns None if none has come; does not wait for any.

        Raises:
            ValueError: the stream cannot be read as the data set describes it; says what to change.
        """
        ...

    def waiting(self, partition: str, place: Place) -> int:
        """Records from `place` on that have come."""
        ...

    def shares(self, places: Mapping[str, Place], limit: int, *, newest: bool) -> Mapping[str, int]:
        """How many waiting records of each partition are among the newest, or oldest, `limit` of all."""
        ...

    def skip(self, partition: str, place: Place, count: int) -> tuple[Place, int]:
        """The place after the next `count` records, or after all that have come, and how many these are."""
        ...

    def found(self, partition: str, since: int) -> Sequence[FoundUnit]:
        """Units in the order in which they were found, but the first `since` ones; part of positions.

        None of Kafka, where nothing comes late, and which tells what it has deleted.
        """
        ...

    def expect(self, partition: str, place: Place, known: Known) -> None:
        """Continue at a place, where an earlier run has found what is `known`.

        The records of known units that have gone are fetched without rows. Others before the place are late.
        """
        ...

    def where(self, partition: str, place: Place) -> str:
        """What users call a place: a file and a row of it, or an offset."""
        ...

    def close(self) -> None:
        """Close files and connections."""
        ...
