"""What started this worker and would start it again: torchrun's agent, or the `cpr run` above it."""

import os
from typing import Final

from cpr.processes import Process

AGENT_PID: Final = "CPR_AGENT_PID"
"""Set in workers that are forks of a prepared process (`cpr.forkserver`), whose parent is not the agent: the
agent's pid, and behind a colon the worker's own, because what the worker starts inherits its environment and
has another parent."""
LAUNCH_PID: Final = "CPR_LAUNCH_PID"
"""Set by `cpr run`: its pid. It starts agents again."""


def agent_pid() -> int:
    """Of the process that started this worker and would start it again."""
    agent, _, worker = os.environ.get(AGENT_PID, "").partition(":")
    return int(agent) if agent and worker in {"", str(os.getpid())} else os.getppid()


def launcher_of_this_worker() -> Process | None:
    """What starts workers again for as long as it lives: `cpr run`, or else the agent; None if it is gone."""
    return Process.find(int(os.environ.get(LAUNCH_PID) or agent_pid()))
