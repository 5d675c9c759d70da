"""Processes of a run, found below its torchrun. Linux only."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpr.processes import LAUNCH_PID, PROXY_NAME, WORKER_NAME, Process, Status

PROC: Final = Path("/proc")
POLL_S: Final = 0.02


@dataclass(frozen=True)
class FoundWorker:
    """A worker started by torchrun."""

    process: Process
    """The process that trains."""
    rank: int
    """Torchrun's rank; after a restart, the run may have assigned another one."""
    agent: Process
    started: Process
    """The process that torchrun started: `process` itself, or its proxy if it is a fork of the fork
    server."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """All processes of the worker."""
        return (self.process,) if self.process == self.started else (self.process, self.started)


def victim(pid: int) -> Process:
    """The process with this pid, after a check that it may be killed.

    Raises:
        ValueError: there is no such process, or it is another user's, this process, or an ancestor of it.
    """
    process = Process.find(pid)
    if process is None:
        raise ValueError(f"there is no process {pid}: give the pid of a torchrun that runs")
    if pid in _own_ancestry():
        raise ValueError(f"process {pid} is this one or one that it runs under: it must not be killed")
    if not _is_own(pid):
        raise ValueError(f"process {pid} belongs to another user")
    return process


def wait_gone(process: Process, timeout_s: float) -> bool:
    """Wait for the end of a process; False if it is still alive after the timeout."""
    deadline = time.monotonic() + timeout_s
    while process.is_alive:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def mapped_files(process: Process) -> list[Path]:
    """Existing files that are mapped into the memory of a process."""
    try:
        lines = (PROC / str(process.pid) / "maps").read_text(errors="surrogateescape").splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []
    fields = (line.split(maxsplit=5) for line in lines)
    names = {parts[5] for parts in fields if len(parts) == 6 and parts[5].startswith("/")}
    return [Path(name) for name in sorted(names) if not name.endswith(" (deleted)")]


def find_workers(root: Process) -> list[FoundWorker]:
    """Workers below a process, sorted by rank: the uppermost processes with a rank in their environment.

    Args:
        root: torchrun, or the process that started torchrun.
    """
    if not root.is_alive:
        return []
    children = _children()
    found = [worker for child in children.get(root.pid, ()) for worker in _below(child, root, children)]
    return sorted(found, key=lambda worker: worker.rank)


def find_all(root: Process) -> list[Process]:
    """A process and all its descendants of this user, including adopted ones."""
    children, found, todo = _children(), [root], [root.pid]
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if _is_own(pid)]
        found += [process for pid in below if (process := Process.find(pid))]
        todo += below
    return found


def _below(pid: int, parent: Process, children: dict[int, list[int]]) -> Iterator[FoundWorker]:
    process = Process.find(pid)
    if process is None or not _is_own(pid):
        return
    environment = _environment(pid)
    rank = environment.get("RANK", "")
    # the uppermost process with a rank is the worker: its children inherit the variable
    if rank.isdigit() and process.is_alive:
        # children of `cpr run` are not workers but adopted: a fork server, a janitor, orphans of a dead agent
        if environment.get(LAUNCH_PID) != str(parent.pid):
            yield FoundWorker(_fork_of(process), int(rank), parent, process)
        return
    for child in children.get(pid, ()):
        yield from _below(child, process, children)


def _fork_of(process: Process) -> Process:
    """The fork of a proxy, which names it; any other process itself."""
    name = _name(process.pid)
    if not name.startswith(PROXY_NAME) or not name[len(PROXY_NAME) :].isdigit():
        return process
    pid = int(name[len(PROXY_NAME) :])
    worker = Process.find(pid)
    return worker if worker and _is_own(pid) and _name(pid) == WORKER_NAME else process


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text().rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_own(pid: int) -> bool:
    try:
        return (PROC / str(pid)).stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _own_ancestry() -> set[int]:
    """Pids of this process and its ancestors."""
    pids, pid = set[int](), os.getpid()
    while pid > 0 and pid not in pids:
        pids.add(pid)
        status = Status.of(pid)
        pid = status.parent if status else 0
    return pids


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (status := Status.of(int(entry.name))):
            children.setdefault(status.parent, []).append(int(entry.name))
    return children


def _environment(pid: int) -> dict[str, str]:
    """Initial environment of a process."""
    try:
        content = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    entries = (entry.decode(errors="surrogateescape").partition("=") for entry in content.split(b"\0"))
    return {name: value for name, _, value in entries}
