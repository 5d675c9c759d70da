"""The torchrun agent of a worker, by pid and start time: a pid alone may be another's tomorrow."""

import os
from pathlib import Path
from typing import Final

AGENT_PID: Final = "CPR_AGENT_PID"
"""Set in workers that are forks of a prepared process (`cpr.standby`), whose parent is not the agent."""


def agent_pid() -> int:
    """Of the process that started this worker and would start it again."""
    return int(os.environ.get(AGENT_PID) or os.getppid())


def agent_of_this_worker() -> tuple[int, int] | None:
    """The agent's pid and its start, in clock ticks since the machine's; None if it is gone."""
    pid = agent_pid()
    start = start_ticks(pid)
    return None if start is None else (pid, start)


def start_ticks(pid: int) -> int | None:
    """When a process was started, in clock ticks since the machine was; None if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat[stat.rindex(b")") + 2 :].split()[19])
