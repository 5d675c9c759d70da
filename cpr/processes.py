"""Processes of this machine, by pid and start time: a pid alone may be another's tomorrow.

Standard library alone, as `cpr run` and the janitor use it as well. Linux only: it reads proc(5).
"""

import ctypes
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

AGENT_PID: Final = "CPR_AGENT_PID"
"""Set in workers that are forks of a prepared process (`cpr.forkserver`), whose parent is not the agent: the
agent's pid, and behind a colon the worker's own, because what the worker starts inherits its environment and
has another parent."""
LAUNCH_PID: Final = "CPR_LAUNCH_PID"
"""Set by `cpr run`: its pid. It starts agents again."""
SERVER_NAME: Final = "cpr-standby"
"""By this name people (`ps -o comm`) and programs tell apart processes that share one command line."""
WORKER_NAME: Final = "cpr-worker"
"""A fork of the prepared process."""
PROXY_NAME: Final = "cpr-for-"
"""Followed by the pid of the fork that does this process's work; at most 15 characters, as Linux has it."""
_PR_SET_NAME: Final = 15


@dataclass(frozen=True, order=True)
class Process:
    """A process that cannot be taken for a later one with the same pid."""

    pid: int
    start_ticks: int
    """When it was started, in clock ticks since the machine was."""

    @classmethod
    def find(cls, pid: int) -> "Process | None":
        """The one that has this pid now; None if there is none, or only its exit code is left."""
        status = Status.of(pid)
        return status.process if status else None

    @classmethod
    def this(cls) -> "Process":
        """The calling one."""
        found = cls.find(os.getpid())
        assert found
        return found

    @property
    def is_alive(self) -> bool:
        """Whether it still runs, or stands still; not if only its exit code is left."""
        return Process.find(self.pid) == self

    @property
    def tag(self) -> str:
        """For the name of a file; `is_tag_alive` tells from it whether the process still runs."""
        return f"{pid_namespace()}-{self.pid}-{self.start_ticks}"

    def send(self, signum: signal.Signals) -> bool:
        """Send it a signal; False if it is gone."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)
                return True
        return False


def pid_namespace() -> int:
    """Number of this process's PID namespace. Containers usually have one each, and pids of their own."""
    return Path("/proc/self/ns/pid").stat().st_ino


def is_tag_alive(tag: str) -> bool | None:
    """Whether the process of a `Process.tag` runs; None: unknown, as it is of another PID namespace."""
    namespace, *numbers = tag.split("-")
    if namespace != str(pid_namespace()) or len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
        return None
    pid, ticks = map(int, numbers)
    return Process(pid, ticks).is_alive


@dataclass(frozen=True)
class Status:
    """A process as it is now."""

    process: Process
    parent: int
    session: int
    """Pid of the process that leads its session."""

    @classmethod
    def of(cls, pid: int) -> "Status | None":
        """None if there is no such process, or only its exit code is left."""
        try:
            content = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = content.rpartition(b")")[2].split()  # from the 3rd on; the 2nd is any name
        if fields[0] in {b"Z", b"X"}:
            return None
        return cls(Process(pid, int(fields[19])), parent=int(fields[1]), session=int(fields[3]))


def agent_pid() -> int:
    """Of the process that started this worker and would start it again."""
    agent, _, worker = os.environ.get(AGENT_PID, "").partition(":")
    return int(agent) if agent and worker in {"", str(os.getpid())} else os.getppid()


def launcher_of_this_worker() -> Process | None:
    """What starts workers again for as long as it lives: `cpr run`, or else the agent; None if it is gone."""
    return Process.find(int(os.environ.get(LAUNCH_PID) or agent_pid()))


def name_this_process(name: str) -> None:
    """Give this process's main thread a name."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
