"""Injection of failures from inside: each worker calls its injector in every step.

`Plan` holds the schedules of a run, and `Plan.to_json` writes them as the document that CPR_FAULTS names:

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
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cpr.faults.damage import damage_newest_save
from cpr.faults.injection_record import InjectionRecord
from cpr.faults.kinds import (
    Abort,
    Damage,
    DamageFile,
    Hang,
    InjectedError,
    KillWorker,
    Kind,
    Raise,
    Slow,
    StorageDelay,
    StorageError,
    StorageOutage,
)
from cpr.faults.schedules import Event, Schedule
from cpr.faults.storages import FaultyStorage
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


if TYPE_CHECKING:
    from cpr.checkpoint.storage.base import Storage

logger = logging.getLogger(__name__)


class Injector:
    """Injects a plan's failures into this worker; without a plan it does nothing.

    Every failure happens once over all restarts, as recorded in `folder`. Events at steps before the first
    step of the injection are skipped. Events whose moment passed during a restart happen at the next step.

    Args:
        plan: of failures, such as `Plan.from_environment()`.
        folder: of the record `faults-<digest of the plan>.jsonl`, shared by all ranks and restarts.
        num_ranks: for drawn targets; None: `WORLD_SIZE` of the environment, or 1.
        memory: folder of this worker's resident memory, for `KillWorker(wipe=True)`.
        checkpoint: checkpoint directory on a file system, for `DamageFile`.

    Raises:
        ValueError: the plan needs a folder that was not given, or has kinds that need a `Killer`.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        folder: Path | None = None,
        num_ranks: int | None = None,
        memory: Path | None = None,
        checkpoint: Path | None = None,
    ) -> None:
        self.plan = plan or Plan()
        self.plan.check(inside=True)
        self._num_ranks = num_ranks or int(os.environ.get("WORLD_SIZE", "1"))
        self._memory, self._checkpoint = memory, checkpoint
        self._storages: list[FaultyStorage] = []
        self._start: tuple[float, int] | None = None
        self._cursor = Cursor(self.plan)
        self._slow: Slow | None = None
        self._num_slow_steps = 0
        self._last_step_ended = time.monotonic()
        self._kinds = [kind for schedule in self.plan.schedules for kind in schedule.kinds_used]
        self._record: InjectionRecord | None = None
        if self.plan.schedules:
            self._check_given(folder)
            assert folder is not None
            self._record = InjectionRecord(folder / f"faults-{self.plan.digest}.jsonl")
            logger.warning("failure injection is on, as asked for by %s", self.plan.source)

    def storage(self, inner: "Storage") -> "Storage":
        """Wrap a storage to inject storage failures; the storage itself if the plan has none."""
        if not any(isinstance(kind, StorageError | StorageDelay | StorageOutage) for kind in self._kinds):
            return inner
        storage = FaultyStorage(inner)
        self._storages.append(storage)
        assert self._record is not None
        for event in self._record.events():  # an outage also affects workers started during it
            kind = build(Kind, event["kind"])
            if isinstance(kind, StorageOutage):
                storage.out(kind, event["time"] + kind.duration_s)
        return storage

    def step(self, step: int, rank: int) -> None:
        """Call once in every step, on every rank, with the same number.

        Args:
            step: steps done; never decreases, except over a restart.
            rank: of this worker.

        Raises:
            InjectedError: the plan has a `Raise` at this step.
        """
        if self._record is None:
            return
        if self._start is None:
            self._start = self._record.begin(step)
        began, first_step = self._start
        self._slow_down()
        elapsed_s = time.time() - began
        # every rank iterates over all events, so that all agree on names and drawn targets
        for name, event in self._cursor.due(step=step, elapsed_s=elapsed_s):
            if event.step is not None and event.step < first_step:
                continue
            if isinstance(event.kind, StorageOutage):
                self._begin_outage(name, event, event.kind, step, rank)
                continue
            target = event.target_of(self._num_ranks)
            if target >= self._num_ranks and rank == 0 and self._claim(name, event, step, target)[0]:
                logger.warning("failure injection: there is no rank %d to strike %s", target, event.when)
            elif target == rank and self._claim(name, event, step, target)[0]:
                self._strike(event, step, rank)
        self._last_step_ended = time.monotonic()

    def _check_given(self, folder: Path | None) -> None:
        """Check that all folders that the plan needs are given."""
        missing = [
            name
            for name, given, needed in (
                ("folder", folder, True),
                ("memory", self._memory, KillWorker(wipe=True) in self._kinds),
                ("checkpoint", self._checkpoint, any(isinstance(kind, DamageFile) for kind in self._kinds)),
            )
            if needed and given is None
        ]
        if missing:
            raise ValueError(f"failures asked for by {self.plan.source} need {', '.join(missing)}: give it")

    def _claim(self, name: str, event: Event, step: int, rank: int) -> tuple[bool, float]:
        assert self._record is not None
        return self._record.claim(name, step=step, rank=rank, kind=encode(event.kind))

    def _begin_outage(self, name: str, event: Event, kind: StorageOutage, step: int, rank: int) -> None:
        """Start an outage on this rank, which began when the first rank reached it."""
        storages = self._own_storages(kind)
        is_first, began = self._claim(name, event, step, rank)
        if is_first:
            self._warn(event, "all ranks", step)
        for storage in storages:
            storage.out(kind, began + kind.duration_s)

    def _slow_down(self) -> None:
        """Sleep for the extra time of a slow worker since the last step."""
        if self._slow is None:
            return
        usual_s = time.monotonic() - self._last_step_ended
        time.sleep((self._slow.factor - 1) * usual_s + self._slow.extra_s)
        self._num_slow_steps += 1
        if self._num_slow_steps >= self._slow.num_steps:
            self._slow = None

    def _warn(self, event: Event, target: str, step: int) -> None:
        what = event.kind.describe(target)
        logger.warning("failure injection: %s at step %d, as asked for by %s", what, step, self.plan.source)

    def _strike(self, event: Event, step: int, rank: int) -> None:
        self._warn(event, f"rank {rank}", step)
        match event.kind:
            case Raise(message=message):
                raise InjectedError(message)
            case Abort():
                os.abort()
            case KillWorker(wipe=wipe):
                if wipe:
                    assert self._memory is not None
                    shutil.rmtree(self._memory, ignore_errors=True)  # it may be gone already
                os.kill(os.getpid(), signal.SIGKILL)
            case Hang(duration_s=duration_s):
                time.sleep(duration_s)
            case Slow() as slow:
                self._slow, self._num_slow_steps = slow, 0
            case DamageFile(how=how):
                self._damage(how, event.seed)
            case StorageError() | StorageDelay() as kind:
                for storage in self._own_storages(kind):
                    storage.inject(kind)

    def _damage(self, how: Damage, seed: int) -> None:
        assert self._checkpoint is not None
        try:
            damage = damage_newest_save(self._checkpoint, how, seed)
        except ValueError as error:  # too early for this failure, which must not end the run
            logger.warning("failure injection: nothing was damaged: %s", error)
        else:
            logger.warning("failure injection: %s", damage)

    def _own_storages(self, kind: Kind) -> list[FaultyStorage]:
        if not self._storages:
            raise ValueError(f"{kind.name} needs the run's storage: pass it through Injector.storage")
        return self._storages
