"""Injection of failures from outside: kills, stops and disconnects processes of a running job."""

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT
from typing import Final, Self

from cpr.faults.damage import check_wipeable, damage_newest_save
from cpr.faults.injector import Cursor, Plan
from cpr.faults.kinds import DamageFile, Hang, KillWorker, Kind, LoseNode, Partition, PauseNode
from cpr.faults.schedules import Event
from cpr.faults.strikes import NetworkLink, Node, Strike, find_victims, strike, watch
from cpr.processes import Process

POLL_S: Final = 0.05

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Deed:
    """One failure that a killer has injected."""

    time: float
    """Seconds since the epoch."""
    after_s: float
    """Since the killer's start."""
    due_s: float
    """Scheduled time since the killer's start."""
    kind: Kind
    target: int | None
    """Torchrun's rank, or number of the node; None: a file."""
    pids: tuple[int, ...]
    """Signalled processes, the worker's or the agent's first."""
    note: str
    """Damaged file, wiped folders, or why nothing happened."""

    @property
    def happened(self) -> bool:
        """Whether a victim was found and struck."""
        return not self.note.startswith(("missed", "failed"))


class Killer:
    """Injects a plan's failures into a run, in its `with` block, or one at a time (`fire`).

    A killer only signals processes of this user below the given pids, and checks pid and start time before
    each signal. A failure whose victim is missing, as while workers are being restarted, waits for it.
    Stopped processes continue, and cut links are healed, after their time, and at the end of the block in any
    case; if two failures hold the same process, after the longer one.

    Args:
        plan: kinds and schedules that can be injected from outside.
        nodes: the torchruns of the run, or their pids.
        checkpoint: checkpoint directory on a file system, for `DamageFile`.
        patience_s: longest wait for a victim before a failure is reported as missed.

    Raises:
        ValueError: the plan has failures that only workers can inject, or needs a folder that is not given;
            or a pid does not belong to a run of this user.
    """

    def __init__(
        self,
        plan: Plan | None = None,
        *,
        nodes: Iterable[Node | int],
        checkpoint: Path | None = None,
        patience_s: float = 60.0,
    ) -> None:
        self.plan = plan or Plan()
        self.plan.check(inside=False)
        self.deeds: list[Deed] = []
        self._nodes = [watch(node) for node in nodes]
        self._checkpoint, self._patience_s = checkpoint, patience_s
        for schedule in self.plan.schedules:
            for kind in schedule.kinds_used:
                self._check_given(kind)
        self._held: list[tuple[float, Process | NetworkLink]] = []
        """Stopped processes and cut links, with the time to resume them."""
        self._ending = threading.Event()
        self._acting = threading.Lock()
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        """Start the plan and its clock; once."""
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="cpr-killer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the plan, resume all stopped processes, and heal all links."""
        self._ending.set()
        self._thread.join()
        self._resume(until=float("inf"))

    def replace(self, index: int, node: Node | int) -> None:
        """Replace a lost node by another torchrun.

        Raises:
            ValueError: the pid does not belong to a run of this user.
        """
        self._nodes[index] = watch(node)

    def fire(self, kind: Kind, *, target: int | None = None, seed: int = 0) -> Deed:
        """Inject one failure now. Only in the `with` block do stopped processes resume.

        Raises:
            ValueError: the kind cannot be injected from outside, or needs a folder that was not given.
        """
        event = Event(kind=kind, time_s=self._elapsed_s, target=target, seed=seed)
        if not kind.outside:
            raise ValueError(f"{kind.name} can only be done by the workers themselves (CPR_FAULTS)")
        self._check_given(kind)
        return self._fire(event)

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def _run(self) -> None:
        cursor = Cursor(self.plan)
        while not self._ending.wait(POLL_S):
            try:
                self._resume(until=time.monotonic())
            except OSError as error:  # retried in the next round
                logger.warning("failure injection: a link could not be healed: %s", error)
            for _name, event in cursor.due(elapsed_s=self._elapsed_s):
                if self._ending.is_set():
                    return
                try:
                    self._fire(event)
                except OSError as error:  # such as a removed file: later failures must still happen
                    self._note(event, None, (), f"failed: {error}")

    def _check_given(self, kind: Kind) -> None:
        if isinstance(kind, DamageFile) and self._checkpoint is None:
            raise ValueError(f"{kind.name} needs to know the checkpoint directory: give checkpoint")
        if isinstance(kind, Partition) and any(node.link is None for node in self._nodes):
            raise ValueError(f"{kind.name} cuts nodes off: say how, with a link for each node")
        if not isinstance(kind, LoseNode) and kind != KillWorker(wipe=True):
            return
        for number, node in enumerate(self._nodes):
            if node.memory is None:
                raise ValueError(
                    f"{kind.name} wipes resident memory: say where node {number} has it "
                    "(memory, its CPR_RESIDENT_ROOT)"
                )
            if isinstance(kind, LoseNode):
                check_wipeable(node.memory)

    def _fire(self, event: Event) -> Deed:
        with self._acting:  # `fire` may be called while the plan is running
            if isinstance(event.kind, DamageFile):
                return self._damage(event, event.kind)
            deadline = time.monotonic() + self._patience_s
            while (victims := find_victims(event, self._nodes)) is None:
                if time.monotonic() > deadline or self._ending.wait(POLL_S):
                    return self._note(event, event.target, (), "missed: there was no such process")
            worker = victims.workers[0]
            what, process = ("node", worker.agent) if event.kind.of_node else ("rank", worker.process)
            self._warn(event, f"{what} {victims.number} (process {process.pid})")
            assert isinstance(event.kind, Strike)
            result = strike(victims, event.kind)
            if isinstance(event.kind, Hang | PauseNode | Partition):
                until = time.monotonic() + event.kind.duration_s
                self._held += [(until, each) for each in result.held]
            return self._note(event, victims.number, result.pids, result.note)

    def _damage(self, event: Event, kind: DamageFile) -> Deed:
        assert self._checkpoint is not None
        self._warn(event, "")
        try:
            note = damage_newest_save(self._checkpoint, kind.how, event.seed)
        except ValueError as error:
            note = f"missed: {error}"
        return self._note(event, None, (), note)

    def _warn(self, event: Event, target: str) -> None:
        what = event.kind.describe(target)
        logger.warning("failure injection: %s %s, as asked for by %s", what, event.when, self.plan.source)

    def _note(self, event: Event, target: int | None, pids: tuple[int, ...], note: str) -> Deed:
        assert event.time_s is not None
        deed = Deed(
            time=time.time(),
            after_s=self._elapsed_s,
            due_s=event.time_s,
            kind=event.kind,
            target=target,
            pids=pids,
            note=note,
        )
        self.deeds.append(deed)
        return deed

    def _resume(self, until: float) -> None:
        for entry in [each for each in self._held if each[0] <= until]:
            held = entry[1]
            if all(other is entry or other[1] != held for other in self._held):  # no other failure holds it
                if isinstance(held, Process):
                    held.send(SIGCONT)
                else:
                    held.heal()
            self._held.remove(entry)
