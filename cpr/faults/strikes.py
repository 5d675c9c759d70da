"""Targets of failures from outside, and what is done to their processes and memory."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from signal import SIGKILL, SIGSTOP, Signals
from typing import Final, Protocol

from cpr.faults.damage import folders_inside, wipe
from cpr.faults.kinds import Hang, KillAgent, KillWorker, LoseNode, Partition, PauseNode
from cpr.faults.schedules import Event
from cpr.faults.worker_processes import FoundWorker, find_all, find_workers, mapped_files, victim, wait_gone
from cpr.processes import Process

Strike = Hang | KillWorker | KillAgent | LoseNode | PauseNode | Partition
GONE_S: Final = 30.0
"""Time for a killed process to end and free its memory."""


class NetworkLink(Protocol):
    """Network connection of a node to all others; both methods may be called at any time, also twice."""

    def cut(self) -> None:
        """Cut the connection.

        Raises:
            OSError: it could not be cut.
        """

    def heal(self) -> None:
        """Restore the connection.

        Raises:
            OSError: it could not be restored.
        """


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node of a run: one torchrun."""

    pid: int
    """Pid of torchrun, or of the `cpr run` that started it and may restart it later."""
    memory: Path | None = None
    """Folder of the resident memory (CPR_RESIDENT_ROOT), for kinds that wipe it. `LoseNode` wipes the whole
    folder, which then must be the node's own."""
    link: NetworkLink | None = None
    """Network connection, for `Partition`."""


@dataclass(frozen=True)
class WatchedNode:
    """A node with its checked process."""

    root: Process
    memory: Path | None
    link: NetworkLink | None


@dataclass(frozen=True)
class Victims:
    """Targets of an event: one worker, or a node with its workers."""

    node: WatchedNode
    number: int
    """Torchrun's rank of the worker, or number of the node."""
    workers: Sequence[FoundWorker]


@dataclass(frozen=True)
class StrikeResult:
    """Result of a strike."""

    pids: tuple[int, ...]
    note: str
    held: tuple[Process | NetworkLink, ...] = ()
    """Stopped processes or cut links, to be resumed later."""


def watch(node: Node | int) -> WatchedNode:
    """Check the process of a node, given as a `Node` or as a pid.

    Raises:
        ValueError: the process may not be killed, see `victim`.
    """
    node = Node(pid=node) if isinstance(node, int) else node
    return WatchedNode(victim(node.pid), node.memory, node.link)


def find_victims(event: Event, nodes: Sequence[WatchedNode]) -> Victims | None:
    """Find the targets of an event; None if they are not alive."""
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


def strike(victims: Victims, kind: Strike) -> StrikeResult:
    """Carry out a strike and wait for its effect.

    Raises:
        OSError: it failed.
    """
    if isinstance(kind, KillAgent | LoseNode):
        return _kill_node(victims, kind)
    if isinstance(kind, PauseNode):
        return _pause_node(victims)
    if isinstance(kind, Partition):
        assert victims.node.link is not None
        victims.node.link.cut()
        return StrikeResult((), "", (victims.node.link,))
    process = victims.workers[0].process
    if isinstance(kind, Hang):
        return StrikeResult(_send(SIGSTOP, [process]), "", (process,))
    folders = []
    if kind.wipe:
        assert victims.node.memory is not None
        folders = folders_inside(victims.node.memory, mapped_files(process))
    pids = _send(SIGKILL, [process])
    note = _wait_gone([process])
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)  # its owner may be removing it as well
    return StrikeResult(pids, note + (_wiped(folders) if kind.wipe else ""))


def _pause_node(victims: Victims) -> StrikeResult:
    """Stop all processes of a node from the top on, so that no stopped one is replaced."""
    stopped: list[Process] = []
    while new := [each for each in find_all(victims.node.root) if each not in stopped]:
        _send(SIGSTOP, new)
        stopped += new
    return StrikeResult(tuple(each.pid for each in stopped), "", tuple(stopped))


def _kill_node(victims: Victims, kind: KillAgent | LoseNode) -> StrikeResult:
    agent = victims.workers[0].agent
    # a stopped agent starts no workers between the search for them and its end
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
    return StrikeResult(pids, note)


def _send(signum: Signals, processes: Sequence[Process]) -> tuple[int, ...]:
    return tuple(process.pid for process in processes if process.send(signum))


def _wait_gone(processes: Sequence[Process]) -> str:
    late = [str(process.pid) for process in processes if not wait_gone(process, GONE_S)]
    return f"not gone after {GONE_S:g} s: {', '.join(late)}; " if late else ""


def _wiped(paths: Sequence[Path]) -> str:
    return f"wiped {', '.join(map(str, paths))}" if paths else "there was no resident memory to wipe"
