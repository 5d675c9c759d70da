"""Which way a worker starts: borrowed from the prepared process, or by itself, leaving one behind."""

import gc
import os
import sys
from collections.abc import Callable

from cpr.agent import agent_of_this_worker
from cpr.standby.borrower import borrow
from cpr.standby.server import serve
from cpr.standby.wire import Agent, connect, listen


def run(prepare: Callable[[], None], work: Callable[[], int]) -> int:
    """Prepare and work, in this process or in one that is prepared already.

    Without torchrun, with a torchrun that does not restart, and where the system lacks what it takes (Linux
    5.3), this is `prepare(); return work()`.

    Args:
        prepare: imports what `work` needs. It starts no thread and does not touch CUDA: a fork would lose
            them.
        work: everything else; reads environment, command line and current folder only now.

    Returns:
        What `work` returned. In a process that only stands for a worker this does not return: it ends as the
        worker did.
    """
    agent = agent_of_this_worker() if _may_stand_by() else None
    if agent is None:
        _import(prepare)
        return work()
    connection = connect(agent)
    if connection is not None:
        borrow(connection, agent)
    _import(prepare)
    if os.environ.get("LOCAL_RANK") == "0":
        _leave_one_behind(agent)
    return work()


def _may_stand_by() -> bool:
    """Whether somebody will start workers again on this node, and this system has what it takes."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and restarts not in {"", "0"}


def _import(prepare: Callable[[], None]) -> None:
    """Prepare without the garbage collector, which finds nothing in imports and takes 1/5 of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        prepare()
    finally:
        gc.freeze()  # what is there now stays, and pages shared with a fork are not written to
        if was_enabled:
            gc.enable()


def _leave_one_behind(agent: Agent) -> None:
    """Fork the process that waits; returns in the worker, and in every fork that is borrowed."""
    listener = listen(agent)
    if listener is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with listener:
        if os.fork() == 0:
            serve(listener, agent)
