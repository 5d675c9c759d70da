"""Which way a worker starts: borrowed from the prepared process, or by itself, leaving one behind."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable

from cpr.forkserver.fork_safety import why_not_to_fork
from cpr.forkserver.protocol import connect, listen, program
from cpr.forkserver.proxy import borrow
from cpr.forkserver.server import serve
from cpr.processes import LAUNCH_PID, Process, launcher_of_this_worker

log = logging.getLogger(__name__)


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
    launcher = launcher_of_this_worker() if _may_stand_by() else None
    if launcher is None:
        _import(prepare)
        return work()
    this_program = program()
    connection = connect(launcher)
    if connection is not None:
        borrow(connection)
    _import(prepare)
    if os.environ.get("LOCAL_RANK") == "0":
        _leave_one_behind(launcher, this_program)
    return work()


def _may_stand_by() -> bool:
    """Whether somebody will start workers again on this node, and this system has what it takes."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in {"", "0"} or LAUNCH_PID in os.environ
    return restarts and sys.platform == "linux" and hasattr(os, "pidfd_open")


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


def _leave_one_behind(launcher: Process, this_program: list[str]) -> None:
    """Fork the process that waits; returns in the worker, and in every fork that is borrowed."""
    listener = listen(launcher)
    if listener is None:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    with listener:
        pid = os.fork()
        if pid == 0:
            serve(listener, launcher, this_program)
            return
    if reason := why_not_to_fork():
        os.kill(pid, signal.SIGKILL)  # nobody has borrowed from it: its forks are for workers of later
        os.waitpid(pid, 0)
        log.warning("no process is prepared for restarts, which will import everything again: %s", reason)
