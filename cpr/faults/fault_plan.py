"""A plan of failures: all schedules of a run, as one JSON document; and a driver's position in it.

The document, as written by `Plan.to_json` and named by CPR_FAULTS:

    {"format": "cpr-faults", "version": 1, "schedules": [
      {"schedule": "at_step", "step": 37, "kind": "kill_worker", "target": 1},
      {"schedule": "at_time", "time_s": 60.0, "kind": {"kind": "hang", "duration_s": 20.0}},
      {"schedule": "at_rate", "mean_s": 60.0, "seed": 7, "distribution": "gamma", "shape": 0.7,
       "kinds": ["kill_worker", {"kind": "kill_worker", "wipe": true}], "num_events": 30},
      {"schedule": "trace", "events": [{"step": 5, "kind": "raise", "target": 0}]}]}

`kind` is a name, or an object with the name and further fields; missing fields have the defaults of the
classes in `kinds` and `schedules`.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Literal

from cpr.faults.kinds import Kind
from cpr.faults.schedules import Event, Schedule
from cpr.strict_json import build, parse

ENVIRONMENT: Final = "CPR_FAULTS"


@dataclass(frozen=True, kw_only=True)
class _Document:
    """The document of a plan."""

    format: Literal["cpr-faults"]
    version: Literal[1]
    schedules: tuple[Schedule, ...]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The failures of a run; none, unless schedules are given."""

    schedules: tuple[Schedule, ...] = ()
    source: str = field(default="the program", compare=False)
    """Origin of the plan, for the log."""

    @classmethod
    def from_environment(cls) -> "Plan":
        """The plan in the file that the environment variable CPR_FAULTS names; an empty one without it.

        Raises:
            ValueError: the file is missing or invalid, has no failures, or has failures that workers cannot
                inject themselves.
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
        """Read a plan from a JSON document.

        Raises:
            ValueError: the file cannot be read, or is not a plan; the message names the place.
        """
        try:
            schedules = cls.from_json(parse(Path(path).read_text())).schedules
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
        """The plan in a document of `to_json`.

        Raises:
            ValueError: the document is not a plan.
        """
        return cls(schedules=build(_Document, document).schedules)

    def to_json(self) -> dict[str, Any]:
        """The plan as a document; see the module docstring."""
        plain: dict[str, Any] = encode(_Document(format="cpr-faults", version=1, schedules=self.schedules))
        return plain

    @property
    def digest(self) -> str:
        """Eight hex digits that identify the plan."""
        return sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:8]

    def check(self, *, inside: bool) -> None:
        """Refuse a plan with failures that a driver cannot inject.

        Args:
            inside: whether the driver is an `Injector`, or else a `Killer`.

        Raises:
            ValueError: another driver is needed.
        """
        for schedule in self.schedules:
            if schedule.counts_steps and not inside:
                raise ValueError(
                    f"{schedule.name} counts steps, which cannot be seen from outside: "
                    "give times (time_s, mean_s), or let the workers do it (CPR_FAULTS)"
                )
            for kind in schedule.kinds_used:
                if not (kind.inside if inside else kind.outside):
                    able = "a Killer outside of the run" if inside else "the workers themselves (CPR_FAULTS)"
                    raise ValueError(f"{kind.name} can only be done by {able}: put it into a plan of its own")


class Cursor:
    """Position of a driver in a plan."""

    def __init__(self, plan: Plan) -> None:
        self._events = [enumerate(schedule) for schedule in plan.schedules]
        self._next = [next(events, None) for events in self._events]

    def due(self, *, step: int = 0, elapsed_s: float = 0.0) -> Iterator[tuple[str, Event]]:
        """Take the events whose moment has come, each with its unique name in the plan."""
        for index, events in enumerate(self._events):
            while (entry := self._next[index]) is not None and entry[1].is_due(step, elapsed_s):
                self._next[index] = next(events, None)
                number, event = entry
                yield f"{index}.{number}", event


def encode(value: Any) -> Any:
    """JSON value of a schedule, of a kind, or of the value of a field; None is left out."""
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if not is_dataclass(value):
        return value
    items = {each.name: getattr(value, each.name) for each in fields(value)}
    plain = {name: encode(item) for name, item in items.items() if item is not None}
    if isinstance(value, Kind):
        return {"kind": value.name, **plain}
    return {"schedule": value.name, **plain} if hasattr(value, "name") else plain
