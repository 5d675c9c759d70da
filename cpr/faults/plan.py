"""A plan: all schedules of a run, as one JSON document, and the place where a driver stands in it.

The document, which `Plan.to_json` gives and CPR_FAULTS names:

    {"format": "cpr-faults", "version": 1, "schedules": [
      {"schedule": "at_step", "step": 37, "kind": "kill_worker", "target": 1},
      {"schedule": "at_time", "time_s": 60.0, "kind": {"kind": "hang", "duration_s": 20.0}},
      {"schedule": "at_rate", "mean_s": 60.0, "seed": 7, "distribution": "gamma", "shape": 0.7,
       "kinds": ["kill_worker", {"kind": "kill_worker", "wipe": true}], "num_events": 30},
      {"schedule": "trace", "events": [{"step": 5, "kind": "raise", "target": 0}]}]}

`kind` is a name, or an object with the name and other fields than the defaults; fields that are not given
have the defaults of the classes in `kinds` and `schedules`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from cpr.faults.plain import decode, encode
from cpr.faults.schedules import SCHEDULES, Event, Schedule, Trace

FORMAT: Final = "cpr-faults"
VERSION: Final = 1
ENVIRONMENT: Final = "CPR_FAULTS"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What shall go wrong in a run; nothing, unless schedules are given."""

    schedules: tuple[Schedule, ...] = ()
    source: str = field(default="the program", compare=False)
    """Who asked for it, for the log."""

    @classmethod
    def from_environment(cls) -> "Plan":
        """The plan in the file that the environment variable CPR_FAULTS names; an empty one without it.

        Raises:
            ValueError: it names no file, no plan, one without failures, or one with failures that
                workers cannot bring about; says what to change.
        """
        path = os.environ.get(ENVIRONMENT)
        if not path:
            return cls()
        plan = cls.read(path, f"{ENVIRONMENT}={path}")
        plan.check(inside=True)
        if not any(True for schedule in plan.schedules for _ in schedule):
            raise ValueError(f"{plan.source} asks for no failure: add schedules, or unset {ENVIRONMENT}")
        return plan

    @classmethod
    def read(cls, path: Path | str, source: str | None = None) -> "Plan":
        """A plan from a JSON document, or from a trace in a file whose name ends in `.csv`.

        Raises:
            ValueError: the file cannot be read, or is no plan; the message says where.
        """
        path = Path(path)
        try:
            if path.suffix == ".csv":
                schedules: tuple[Schedule, ...] = (Trace.read_csv(path),)
            else:
                schedules = cls.from_json(json.loads(path.read_text())).schedules
        except OSError as error:
            raise ValueError(
                f"the failures to inject ({source or path}) cannot be read: {error.strerror}; name another "
                "file"
            ) from error
        except ValueError as error:
            raise ValueError(f"{path} is no plan of failures: {error}") from error
        return cls(schedules=schedules, source=source or str(path))

    @classmethod
    def from_json(cls, document: Any) -> "Plan":
        """The plan in a document, as `to_json` gives it.

        Raises:
            ValueError: it is none; the message says what is wrong.
        """
        expected = {"format": FORMAT, "version": VERSION}
        if not isinstance(document, Mapping) or set(document) != {*expected, "schedules"}:
            raise ValueError("it must be an object with format, version and schedules")
        for name, value in expected.items():
            if document[name] != value:
                raise ValueError(f"its {name} is {document[name]!r}; this program reads {value!r}")
        if not isinstance(document["schedules"], list):
            raise ValueError("its schedules must be a list")
        return cls(
            schedules=tuple(_decode(index, entry) for index, entry in enumerate(document["schedules"]))
        )

    def to_json(self) -> dict[str, Any]:
        """See `FORMAT` and the docstring of this module."""
        schedules = [{"schedule": schedule.name, **encode(schedule)} for schedule in self.schedules]
        return {"format": FORMAT, "version": VERSION, "schedules": schedules}

    @property
    def digest(self) -> str:
        """Eight hex digits that tell plans apart."""
        return sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:8]

    def check(self, *, inside: bool) -> None:
        """Refuse what a driver cannot do.

        Args:
            inside: whether it is an `Injector`, or else a `Killer`.

        Raises:
            ValueError: another driver is needed.
        """
        for schedule in self.schedules:
            if schedule.unit == "step" and not inside:
                raise ValueError(
                    f"{schedule.name} counts steps, which cannot be seen from outside: "
                    "give times (time_s, mean_s), or let the workers do it (CPR_FAULTS)"
                )
            for kind in schedule.kinds_used:
                if not (kind.inside if inside else kind.outside):
                    able = "a Killer beside the run" if inside else "the workers themselves (CPR_FAULTS)"
                    raise ValueError(f"{kind.name} can only be done by {able}: put it into a plan of its own")


class Cursor:
    """How far a driver has come in a plan."""

    def __init__(self, plan: Plan) -> None:
        self._heads = [_Head(index, schedule) for index, schedule in enumerate(plan.schedules)]

    def due(self, *, step: int = 0, elapsed_s: float = 0.0) -> Iterator[tuple[str, Event]]:
        """Take the events whose moment has come, each with a name that is its own in the plan."""
        for head in self._heads:
            while head.event is not None and head.event.is_due(step, elapsed_s):
                event, name = head.event, head.event_name
                head.advance()
                yield name, event


class _Head:
    """The next event of a schedule."""

    def __init__(self, index: int, schedule: Schedule) -> None:
        self._index, self._number = index, -1
        self._events = iter(schedule)
        self.advance()

    def advance(self) -> None:
        self.event = next(self._events, None)
        self._number += 1

    @property
    def event_name(self) -> str:
        return f"{self._index}.{self._number}"


def _decode(index: int, entry: Any) -> Schedule:
    name = entry.get("schedule") if isinstance(entry, Mapping) else None
    if name not in SCHEDULES:
        raise ValueError(f"schedules[{index}] has schedule {name!r}; choose one of {', '.join(SCHEDULES)}")
    fields = {key: value for key, value in entry.items() if key != "schedule"}
    schedule: Schedule = decode(SCHEDULES[name], fields, f"schedules[{index}]")
    return schedule
