"""Processes of this machine, identified by pid and start time, as pids are reused.

Standard library only, as `cpr run` and the janitor use it as well. Linux only: reads proc(5).
"""

import ctypes
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

AGENT_PID: Final = "CPR_AGENT_PID"
"""Environment variable of workers forked by the fork server, whose parent is not the agent: the agent's pid,
a colon, and the worker's own pid, as children of the worker inherit the variable but have another parent."""
LAUNCH_PID: Final = "CPR_LAUNCH_PID"
"""Environment variable with the pid of `cpr run`, which restarts agents."""
SERVER_NAME: Final = "cpr-forksrv"
"""Name (`ps -o comm`) of the fork server, which has the same command line as its forks and their proxies."""
WORKER_NAME: Final = "cpr-worker"
"""Name of a fork of the fork server."""
PROXY_NAME: Final = "cpr-for-"
"""Name of a proxy, followed by the pid of its fork; at most 15 characters, the limit of Linux."""
_PR_SET_NAME: Final = 15


def cores_of_worker() -> int:
    """This worker's share of the cores that the workers of its node may run on, at least one."""
    return max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True, order=True)
class Process:
    """A process, distinguished from later ones with the same pid."""

    pid: int
    start_ticks: int
    """Start time, in clock ticks since boot."""

    @classmethod
    def find(cls, pid: int) -> "Process | None":
        """The process that has a pid now; None if there is none, or if it is a zombie."""
        status = Status.of(pid)
        return status.process if status else None

    @classmethod
    def this(cls) -> "Process":
        """The calling process."""
        found = cls.find(os.getpid())
        assert found
        return found

    @property
    def is_alive(self) -> bool:
        """Whether the process runs or is stopped; False for a zombie."""
        return Process.find(self.pid) == self

    @property
    def tag(self) -> str:
        """Text for a file name, from which `is_tag_alive` tells whether the process still runs."""
        return f"{pid_namespace()}-{self.pid}-{self.start_ticks}"

    def send(self, signum: signal.Signals) -> bool:
        """Send a signal; False if the process is gone."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)
                return True
        return False


def pid_namespace() -> int:
    """Number of this process's PID namespace; containers usually have one each, with their own pids."""
    return Path("/proc/self/ns/pid").stat().st_ino


def is_tag_alive(tag: str) -> bool | None:
    """Whether the process of a `Process.tag` runs; None if unknown, as in another PID namespace."""
    namespace, *numbers = tag.split("-")
    if namespace != str(pid_namespace()) or len(numbers) != 2 or not all(map(str.isdecimal, numbers)):
        return None
    pid, ticks = map(int, numbers)
    return Process(pid, ticks).is_alive


@dataclass(frozen=True)
class Status:
    """Current status of a process."""

    process: Process
    parent: int
    session: int
    """Pid of the session leader."""

    @classmethod
    def of(cls, pid: int) -> "Status | None":
        """Read the status; None if there is no such process, or if it is a zombie."""
        try:
            content = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        # from the 3rd field on; the 2nd is a name that may contain anything
        fields = content.rpartition(b")")[2].split()
        if fields[0] in {b"Z", b"X"}:
            return None
        return cls(Process(pid, int(fields[19])), parent=int(fields[1]), session=int(fields[3]))


def agent_pid() -> int:
    """Pid of the process that started this worker and would restart it."""
    agent, _, worker = os.environ.get(AGENT_PID, "").partition(":")
    return int(agent) if agent and worker in {"", str(os.getpid())} else os.getppid()


def launcher_of_this_worker() -> Process | None:
    """The process that restarts workers: `cpr run`, or else the agent; None if it is gone."""
    return Process.find(int(os.environ.get(LAUNCH_PID) or agent_pid()))


def name_this_process(name: str) -> None:
    """Set the name of this process's main thread."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
