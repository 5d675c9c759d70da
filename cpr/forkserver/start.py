"""Start of a worker: as a fork of the fork server, or by itself, leaving a fork server behind."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Callable

from cpr.forkserver.fork_safety import why_not_to_fork
from cpr.forkserver.protocol import connect, listen, program
from cpr.forkserver.proxy import become_proxy
from cpr.forkserver.server import serve
from cpr.processes import LAUNCH_PID, Process, launcher_of_this_worker

log = logging.getLogger(__name__)


def run(prepare: Callable[[], None], work: Callable[[], int]) -> int:
    """Run `prepare` and `work`, in this process or in a fork of the fork server, which is prepared already.

    Without torchrun, with a torchrun that does not restart, and on systems without the needed calls (Linux
    before 5.3), this is `prepare(); return work()`.

    Args:
        prepare: imports what `work` needs. Must not start threads or touch CUDA: forks would lose both.
        work: everything else; must read environment, command line and current folder only now.

    Returns:
        The result of `work`. Does not return in the proxy of a fork, which ends as the fork ends.
    """
    may_restart = (
        os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") not in {"", "0"} or LAUNCH_PID in os.environ
    )
    is_supported = sys.platform == "linux" and hasattr(os, "pidfd_open")
    launcher = launcher_of_this_worker() if may_restart and is_supported else None
    if launcher is None:
        _import(prepare)
        return work()
    this_program = program()
    connection = connect(launcher)
    if connection is not None:
        become_proxy(connection)
    _import(prepare)
    if os.environ.get("LOCAL_RANK") == "0":
        _leave_server(launcher, this_program)
    return work()


def _import(prepare: Callable[[], None]) -> None:
    """Prepare without the garbage collector, which finds nothing in imports and takes 1/5 of their time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        prepare()
    finally:
        gc.freeze()  # keeps the collector from writing to pages shared with forks
        if was_enabled:
            gc.enable()


def _leave_server(launcher: Process, this_program: list[str]) -> None:
    """Fork the fork server; returns in the worker, and in every fork of the server."""
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
    # checked only now: libraries such as OpenBLAS end their own threads for a fork
    if reason := why_not_to_fork():
        os.kill(pid, signal.SIGKILL)  # it has no forks yet, as those are for the next generation
        os.waitpid(pid, 0)
        log.warning("no fork server for restarts, which will import everything again: %s", reason)
