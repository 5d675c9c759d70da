"""Schedules of failures: iterables of events with their time, kind and target.

An event is at a step or at a time. Steps are the run's (`step` of `Injector.step`); times are seconds since
the driver's start, for an `Injector` its first start: restarts do not reset the clock.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import Any, ClassVar, Final, Literal

from cpr.faults.kinds import Kind
from cpr.strict_json import build, register

Distribution = Literal["exponential", "gamma", "weibull"]
SHAPES: Final = (0.1, 100.0)
"""Allowed shape parameters, as in `cpr.estimator.failures.arrivals`."""
_DRAWS: Final[dict[Distribution, Callable[[Random, float], float]]] = {
    "exponential": lambda random, _shape: random.expovariate(1.0),
    "gamma": lambda random, shape: random.gammavariate(shape, 1 / shape),
    "weibull": lambda random, shape: random.weibullvariate(1 / math.gamma(1 + 1 / shape), shape),
}
"""Times between failures with mean 1."""


class Schedule:
    """Failures in the order of their moments, all at steps or all at times."""

    name: ClassVar[str]
    """In JSON."""

    @property
    def counts_steps(self) -> bool:
        """Whether the failures are at steps, not at times."""
        return any(event.step is not None for event in islice(self, 1))

    @property
    def kinds_used(self) -> tuple[Kind, ...]:
        """All kinds that can happen."""
        return tuple(event.kind for event in self)

    def __iter__(self) -> Iterator["Event"]:
        """The events, the same at every iteration, perhaps infinitely many."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Event(Schedule):
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

    def __iter__(self) -> Iterator["Event"]:
        yield self

    @property
    def moment(self) -> float:
        """The step, or the time in seconds."""
        moment = self.time_s if self.step is None else self.step
        assert moment is not None
        return moment

    @property
    def when(self) -> str:
        """The moment as text for messages."""
        return f"at {round(self.moment, 1):g} s" if self.step is None else f"at step {self.step}"

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Whether the moment has come."""
        return self.moment <= (elapsed_s if self.step is None else step)

    def target_of(self, num_targets: int) -> int:
        """The target; a given one may be `num_targets` or above, and then does not exist."""
        return Random(self.seed).randrange(num_targets) if self.target is None else self.target


class AtStep(Event):
    """A schedule of one failure, at a step."""

    name = "at_step"


class AtTime(Event):
    """A schedule of one failure, at a time."""

    name = "at_time"


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
    """Of the time between failures."""
    shape: float = 1.0
    """Of gamma and Weibull: 1 is exponential, below 1 failures come in bursts, above 1 regularly."""
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
        if self.distribution not in _DRAWS:
            raise ValueError(f"distribution is {self.distribution!r}; choose one of {', '.join(_DRAWS)}")
        if not SHAPES[0] <= self.shape <= SHAPES[1]:
            raise ValueError(f"shape is {self.shape:g}; it must be from {SHAPES[0]:g} to {SHAPES[1]:g}")
        next(iter(self), None)  # an event checks its fields

    @property
    def kinds_used(self) -> tuple[Kind, ...]:
        """See `Schedule.kinds_used`."""
        return self.kinds

    def __iter__(self) -> Iterator[Event]:
        random, moment = Random(self.seed), 0.0
        for _ in count() if self.num_events is None else range(self.num_events):
            # one generator in a fixed order of calls: a seed gives the same events on every machine
            moment += self._mean * _DRAWS[self.distribution](random, self.shape)
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
        if len({event.counts_steps for event in self.events}) > 1:
            raise ValueError("a trace has steps or times, not both: make two traces of it")

    def __iter__(self) -> Iterator[Event]:
        return iter(sorted(self.events, key=lambda event: event.moment))


SCHEDULES: Final[dict[str, type[Schedule]]] = {
    schedule.name: schedule for schedule in (AtStep, AtTime, AtRate, Trace)
}


def _read_schedule(value: Any) -> Schedule:
    name = value.get("schedule") if isinstance(value, Mapping) else None
    if not isinstance(name, str) or name not in SCHEDULES:
        raise ValueError(f"schedule is {name!r}; choose one of {', '.join(SCHEDULES)}")
    return build(SCHEDULES[name], {key: each for key, each in value.items() if key != "schedule"})


register(Schedule, _read_schedule)
