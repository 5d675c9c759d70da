"""The processes of a run, found below its torchrun, and signals that can hit nobody else.

A process is its pid and its start time: a pid that was given to another process meanwhile is not touched.
Linux only.
"""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpr.standby.names import STAND_IN, WORKER

PROC: Final = Path("/proc")
POLL_S: Final = 0.02


@dataclass(frozen=True)
class Process:
    """One process of this user."""

    pid: int
    started: int
    """In clock ticks since boot."""

    @classmethod
    def of(cls, pid: int) -> "Process":
        """The process that has this pid now.

        Raises:
            ValueError: it is not there, another user's, this process, or one that this process runs under.
        """
        status = _status(pid)
        if status is None:
            raise ValueError(f"there is no process {pid}: give the pid of a torchrun that runs")
        if pid in _own_line():
            raise ValueError(f"process {pid} is this one or one that it runs under: it is not for killing")
        if not _is_own(pid):
            raise ValueError(f"process {pid} belongs to another user")
        return cls(pid, status.started)

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, or stands still; not if only its exit code is left."""
        status = _status(self.pid)
        return status is not None and status.started == self.started

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal; False if it is gone."""
        if not self.is_alive:
            return False
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return False
        return True

    def wait_gone(self, timeout_s: float) -> bool:
        """Wait for its end; False if it is still there afterwards."""
        deadline = time.monotonic() + timeout_s
        while self.is_alive:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True

    def mapped_files(self) -> list[Path]:
        """Files in its memory that have not been removed."""
        try:
            lines = (PROC / str(self.pid) / "maps").read_text(errors="surrogateescape").splitlines()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            return []
        fields = (line.split(maxsplit=5) for line in lines)
        names = {parts[5] for parts in fields if len(parts) == 6 and parts[5].startswith("/")}
        return [Path(name) for name in sorted(names) if not name.endswith(" (deleted)")]


@dataclass(frozen=True)
class Worker:
    """One worker that torchrun started."""

    process: Process
    """The one that works."""
    rank: int
    """As torchrun gave it; after a restart, the run may have given the worker its old rank back."""
    agent: Process
    started: Process
    """The one that torchrun started; another one if it only stands for a fork of a prepared process."""

    @property
    def processes(self) -> tuple[Process, ...]:
        """All there is of it."""
        return (self.process,) if self.process == self.started else (self.process, self.started)


def find_workers(root: Process) -> list[Worker]:
    """Workers below a process, by rank: the uppermost ones in whose environment there is a rank.

    Args:
        root: torchrun, or whatever started it.
    """
    if not root.is_alive:
        return []
    children = _children()
    found = [worker for child in children.get(root.pid, ()) for worker in _below(child, root, children)]
    return sorted(found, key=lambda worker: worker.rank)


def _below(pid: int, parent: Process, children: dict[int, list[int]]) -> Iterator[Worker]:
    status = _status(pid)
    if status is None or not _is_own(pid):
        return
    process = Process(pid, status.started)
    rank = _rank(pid)
    if rank is not None and process.is_alive:
        yield Worker(_behind(process), rank, parent, process)
        return
    for child in children.get(pid, ()):
        yield from _below(child, process, children)


def _behind(process: Process) -> Process:
    """The process that does the work of one that only stands for it, and says so by its name."""
    name = _name(process.pid)
    if not name.startswith(STAND_IN) or not name[len(STAND_IN) :].isdigit():
        return process
    pid = int(name[len(STAND_IN) :])
    status = _status(pid)
    is_its_worker = status is not None and _is_own(pid) and _name(pid) == WORKER
    return Process(pid, status.started) if status is not None and is_its_worker else process


def _name(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text().rstrip("\n")
    except (FileNotFoundError, ProcessLookupError):
        return ""


@dataclass(frozen=True)
class _Status:
    parent: int
    started: int


def _status(pid: int) -> _Status | None:
    """None when there is no such process, or only its exit code."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, started = fields[0], fields[1], fields[19]  # the 3rd, 4th and 22nd field in proc(5)
    return None if state in "ZX" else _Status(int(parent), int(started))


def _is_own(pid: int) -> bool:
    try:
        return (PROC / str(pid)).stat().st_uid == os.geteuid()
    except FileNotFoundError:
        return False


def _own_line() -> set[int]:
    """This process and those above it."""
    line, pid = set[int](), os.getpid()
    while pid > 0 and pid not in line:
        line.add(pid)
        status = _status(pid)
        pid = status.parent if status else 0
    return line


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit() and (status := _status(int(entry.name))):
            children.setdefault(status.parent, []).append(int(entry.name))
    return children


def _rank(pid: int) -> int | None:
    try:
        environment = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    for entry in environment.split(b"\0"):
        if entry.startswith(b"RANK=") and entry[5:].isdigit():
            return int(entry[5:])
    return None
