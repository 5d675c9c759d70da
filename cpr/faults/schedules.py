"""Schedules of failures: iterables of events with their time, kind and target.

An event is at a step or at a time. Steps are the run's (`step` of `Injector.step`); times are seconds since
the driver's start, for an `Injector` its first start: restarts do not reset the clock.
"""

import csv
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final, Literal

from cpr.faults.codec import decode, from_cells
from cpr.faults.draws import Distribution, make_draw
from cpr.faults.kinds import KINDS, Kind

Unit = Literal["step", "time"]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One failure, at a `step` or at a `time_s`."""

    kind: Kind
    step: int | None = None
    time_s: float | None = None
    target: int | None = None
    """Rank, or number of the node for kinds that strike a node; None: drawn by the seed."""
    seed: int = 0
    """Seed of all random choices of the kind."""

    def __post_init__(self) -> None:
        if (self.step is None) == (self.time_s is None):
            raise ValueError("an event happens at a step or at a time_s: give one of the two")
        if not 0 <= self.moment < math.inf:
            raise ValueError(f"an event is {self.when}; steps and times start at 0")
        if self.target is not None and self.target < 0:
            raise ValueError(f"target is {self.target}; ranks and nodes start at 0 (none: drawn by the seed)")

    @property
    def unit(self) -> Unit:
        """Unit of the moment."""
        return "time" if self.step is None else "step"

    @property
    def moment(self) -> float:
        """The step, or the time in seconds."""
        moment = self.time_s if self.step is None else self.step
        assert moment is not None
        return moment

    @property
    def when(self) -> str:
        """The moment as text for messages."""
        return f"at {self.time_s:g} s" if self.step is None else f"at step {self.step}"

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Whether the moment has come."""
        return self.moment <= (elapsed_s if self.step is None else step)

    def target_of(self, num_targets: int) -> int:
        """The target; a given one may be `num_targets` or above, and then does not exist."""
        return Random(self.seed).randrange(num_targets) if self.target is None else self.target


class Schedule(ABC):
    """Failures in the order of their moments, all at steps or all at times."""

    name: ClassVar[str]
    """In JSON."""

    @property
    @abstractmethod
    def unit(self) -> Unit:
        """Unit of all moments."""

    @property
    @abstractmethod
    def kinds_used(self) -> tuple[Kind, ...]:
        """All kinds that can happen."""

    @abstractmethod
    def __iter__(self) -> Iterator[Event]:
        """The events, the same at every iteration, perhaps infinitely many."""


class _Single(Schedule):
    """A schedule of one event with the fields of the schedule."""

    kind: Kind

    def __post_init__(self) -> None:
        list(self)  # the event checks its fields

    @property
    def unit(self) -> Unit:
        """See `Schedule.unit`."""
        return next(iter(self)).unit

    @property
    def kinds_used(self) -> tuple[Kind, ...]:
        """See `Schedule.kinds_used`."""
        return (self.kind,)

    def __iter__(self) -> Iterator[Event]:
        yield Event(**vars(self))


@dataclass(frozen=True, kw_only=True)
class AtStep(_Single):
    """One failure at a step."""

    name: ClassVar[str] = "at_step"
    step: int
    kind: Kind
    target: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class AtTime(_Single):
    """One failure at a time."""

    name: ClassVar[str] = "at_time"
    time_s: float
    kind: Kind
    target: int | None = None
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class AtRate(Schedule):
    """Repeated random failures; the same for the same seed."""

    name: ClassVar[str] = "at_rate"
    kinds: tuple[Kind, ...]
    """Each failure is one of these, all equally likely; a kind named twice is twice as likely."""
    seed: int
    mean_s: float | None = None
    """Mean seconds between failures; or give `mean_steps`."""
    mean_steps: float | None = None
    """Mean steps between failures; moments are rounded up to whole steps."""
    distribution: Distribution = "exponential"
    shape: float = 1.0
    """Of the distribution, see `make_draw`."""
    target: int | None = None
    num_events: int | None = None
    """Number of failures; None: infinite."""

    def __post_init__(self) -> None:
        if (self.mean_s is None) == (self.mean_steps is None):
            raise ValueError("failures at a rate need mean_s or mean_steps: give one of the two")
        if not 0 < self._mean < math.inf:
            raise ValueError(f"the mean between failures is {self._mean}; it must be a positive number")
        if not self.kinds:
            raise ValueError("failures at a rate need at least one kind in kinds")
        if self.num_events is not None and self.num_events < 0:
            raise ValueError(f"num_events is {self.num_events}; it must not be negative (none: no end)")
        next(islice(iter(self), 1), None)  # the distribution and an event check their fields

    @property
    def unit(self) -> Unit:
        """See `Schedule.unit`."""
        return "step" if self.mean_s is None else "time"

    @property
    def kinds_used(self) -> tuple[Kind, ...]:
        """See `Schedule.kinds_used`."""
        return self.kinds

    def __iter__(self) -> Iterator[Event]:
        draw, random, moment = make_draw(self.distribution, self.shape), Random(self.seed), 0.0
        for _ in count() if self.num_events is None else range(self.num_events):
            # one generator in a fixed order of calls: a seed gives the same events on every machine
            moment += self._mean * draw(random)
            yield Event(
                step=math.ceil(moment) if self.mean_s is None else None,
                time_s=None if self.mean_s is None else moment,
                kind=random.choice(self.kinds),
                target=self.target,
                seed=random.getrandbits(32),
            )

    @property
    def _mean(self) -> float:
        mean = self.mean_steps if self.mean_s is None else self.mean_s
        assert mean is not None
        return mean


@dataclass(frozen=True, kw_only=True)
class Trace(Schedule):
    """Recorded or hand-written failures, all at steps or all at times."""

    name: ClassVar[str] = "trace"
    events: tuple[Event, ...]

    def __post_init__(self) -> None:
        if len({event.unit for event in self.events}) > 1:
            raise ValueError("a trace has steps or times, not both: make two traces of it")

    @property
    def unit(self) -> Unit:
        """See `Schedule.unit`."""
        return self.events[0].unit if self.events else "time"

    @property
    def kinds_used(self) -> tuple[Kind, ...]:
        """See `Schedule.kinds_used`."""
        return tuple(event.kind for event in self.events)

    def __iter__(self) -> Iterator[Event]:
        return iter(sorted(self.events, key=lambda event: event.moment))

    @classmethod
    def read_csv(cls, path: Path) -> "Trace":
        """Read a trace from a CSV file with a header.

        Columns: `step` or `time_s`, `kind` (its name), and optionally `target`, `seed` and fields of the
        kinds; empty cells count as not given.

        Raises:
            ValueError: the file is not such a table; the message names the line.
        """
        events = []
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), start=2):
                try:
                    events.append(_event_of_row(row))
                except ValueError as error:
                    raise ValueError(f"line {number}: {error}") from error
        return cls(events=tuple(events))


def _event_of_row(row: dict[Any, Any]) -> Event:
    if None in row:
        raise ValueError("there are more cells than the header has names")
    given: dict[str, str] = {name: cell for name, cell in row.items() if name is not None and cell}
    own = {name: given.pop(name) for name in list(given) if name in {"step", "time_s", "target", "seed"}}
    kind_fields = from_cells(KINDS.get(given.get("kind", ""), Kind), given)
    return decode(Event, {**from_cells(Event, own), "kind": kind_fields}, "event")


SCHEDULES: Final[dict[str, type[Any]]] = {
    schedule.name: schedule for schedule in (AtStep, AtTime, AtRate, Trace)
}
