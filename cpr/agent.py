"""The torchrun agent of a worker, by pid and start time: a pid alone may be another's tomorrow."""

import os
from pathlib import Path
from typing import Final

AGENT_PID: Final = "CPR_AGENT_PID"
"""Set in workers that are forks of a prepared process (`cpr.standby`), whose parent is not the agent: the
agent's pid, and behind a colon the worker's own, because what the worker starts inherits its environment and
has another parent."""
LAUNCH_PID: Final = "CPR_LAUNCH_PID"
"""Set by `cpr run`: its pid. It starts agents again."""


def agent_pid() -> int:
    """Of the process that started this worker and would start it again."""
    agent, _, worker = os.environ.get(AGENT_PID, "").partition(":")
    return int(agent) if agent and worker in {"", str(os.getpid())} else os.getppid()


def launcher_of_this_worker() -> tuple[int, int] | None:
    """What starts workers again for as long as it lives: `cpr run`, or else the agent.

    Returns:
        Its pid and its start, in clock ticks since the machine's; None if it is gone.
    """
    pid = int(os.environ.get(LAUNCH_PID) or agent_pid())
    start = start_ticks(pid)
    return None if start is None else (pid, start)


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[19])
