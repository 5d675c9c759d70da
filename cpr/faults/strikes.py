"""Whom a failure from outside hits, and what is done to the processes and the memory of these."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP, Signals
from typing import Final, Protocol

from cpr.faults.damage import folders_inside, wipe
from cpr.faults.kinds import Hang, KillAgent, KillWorker, LoseNode, Partition, PauseNode
from cpr.faults.processes import Worker, find_all, find_workers, mapped_files, victim, wait_gone
from cpr.faults.schedules import Event
from cpr.processes import Process

Strike = Hang | KillWorker | KillAgent | LoseNode | PauseNode | Partition
GONE_S: Final = 30.0
"""How long a process that was killed may take to be gone, its memory given back."""


class Link(Protocol):
    """What connects a node to all others; both methods may be called at any time, also twice."""

    def cut(self) -> None:
        """Nothing passes any more.

        Raises:
            OSError: that did not work.
        """

    def heal(self) -> None:
        """All passes again.

        Raises:
            OSError: that did not work.
        """


@dataclass(frozen=True, kw_only=True)
class Node:
    """One torchrun of the run."""

    pid: int
    """Of torchrun, or of what started it (`cpr run`), which may start another one later."""
    memory: Path | None = None
    """Where resident memory is (CPR_RESIDENT_ROOT), for kinds that wipe it; `LoseNode` wipes all in this
    folder, so there it must be the node's own."""
    link: Link | None = None
    """How the node is cut off, for `Partition`."""


@dataclass(frozen=True)
class Watched:
    """A node whose process has been looked at."""

    root: Process
    memory: Path | None
    link: Link | None


@dataclass(frozen=True)
class Victims:
    """Whom an event hits: one worker, or a node with the workers it has."""

    node: Watched
    number: int
    """Rank of the worker as torchrun gave it, or number of the node."""
    workers: Sequence[Worker]


@dataclass(frozen=True)
class Done:
    """What became of them."""

    pids: tuple[int, ...]
    note: str
    held: tuple[Process | Link, ...] = ()
    """What stands still or is cut, until it is to go on."""


def watch(node: Node | int) -> Watched:
    """Look at the process of a node, or at the process with this pid.

    Raises:
        ValueError: it is not one of a run of this user.
    """
    node = Node(pid=node) if isinstance(node, int) else node
    return Watched(victim(node.pid), node.memory, node.link)


def find_victims(event: Event, nodes: Sequence[Watched]) -> Victims | None:
    """None: whom the event is for is not there."""
    if event.kind.of_node:
        number = event.target_of(len(nodes))
        workers = find_workers(nodes[number].root) if number < len(nodes) else []
        return Victims(nodes[number], number, workers) if workers else None
    found = [(node, worker) for node in nodes for worker in find_workers(node.root)]
    found.sort(key=lambda pair: pair[1].rank)
    if event.target is not None:
        found = [pair for pair in found if pair[1].rank == event.target]
    if not found:
        return None
    node, worker = found[Random(event.seed).randrange(len(found))]
    return Victims(node, worker.rank, [worker])


def strike(victims: Victims, kind: Strike) -> Done:
    """Do it, and see it done.

    Raises:
        OSError: it did not work.
    """
    if isinstance(kind, KillAgent | LoseNode):
        return _kill_node(victims, kind)
    if isinstance(kind, PauseNode):
        return _pause_node(victims)
    if isinstance(kind, Partition):
        assert victims.node.link is not None
        victims.node.link.cut()
        return Done((), "", (victims.node.link,))
    process = victims.workers[0].process
    if isinstance(kind, Hang):
        return Done(_send(SIGSTOP, [process]), "", (process,))
    folders = []
    if kind.wipe:
        assert victims.node.memory is not None
        folders = folders_inside(victims.node.memory, mapped_files(process))
    pids = _send(SIGKILL, [process])
    note = _wait_gone([process])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # what it belonged to may be faster
    return Done(pids, note + (_wiped(folders) if kind.wipe else ""))


def _pause_node(victims: Victims) -> Done:
    """From the top on, so that what starts others stands still first."""
    stopped: list[Process] = []
    while new := [each for each in find_all(victims.node.root) if each not in stopped]:
        _send(SIGSTOP, new)
        stopped += new
    return Done(tuple(each.pid for each in stopped), "", tuple(stopped))


def _kill_node(victims: Victims, kind: KillAgent | LoseNode) -> Done:
    agent = victims.workers[0].agent
    # An agent that stands still starts no workers between the look for them and the end.
    _send(SIGSTOP, [agent])
    hit = [agent]
    if isinstance(kind, LoseNode) or kind.workers:
        workers = [worker for worker in find_workers(victims.node.root) if worker.agent == agent]
        hit += [process for worker in workers for process in worker.processes]
    pids = _send(SIGKILL, hit)
    note = _wait_gone(hit)
    if isinstance(kind, LoseNode):
        assert victims.node.memory is not None
        note += _wiped(wipe(victims.node.memory))
    return Done(pids, note)


def _send(signum: Signals, processes: Sequence[Process]) -> tuple[int, ...]:
    return tuple(process.pid for process in processes if process.send(signum))


def _wait_gone(processes: Sequence[Process]) -> str:
    late = [str(process.pid) for process in processes if not wait_gone(process, GONE_S)]
    return f"not gone after {GONE_S:g} s: {', '.join(late)}; " if late else ""


def _wiped(paths: Sequence[Path]) -> str:
    return f"wiped {', '.join(map(str, paths))}" if paths else "there was no resident memory to wipe"
