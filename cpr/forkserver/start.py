"""Start of a worker: as a fork of the fork server, or by itself, leaving a fork server behind.

The process that torchrun started becomes the proxy of its fork: it forwards signals, and ends as it ends.
"""

import gc
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from cpr.forkserver.protocol import (
    NUMBER,
    REQUEST_S,
    Request,
    connect,
    listen,
    program,
    receive,
    send_request,
)
from cpr.forkserver.server import serve, why_not_to_fork
from cpr.processes import (
    LAUNCH_PID,
    PROXY_NAME,
    Process,
    agent_pid,
    launcher_of_this_worker,
    name_this_process,
)

FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)

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
        _become_proxy(connection)
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


def _become_proxy(connection: socket.socket) -> None:
    """Have a fork do this process's work, and end as the fork ends.

    Returns only if the fork server does not answer, or refuses because files of the program have changed:
    then there is no fork, and this process must work itself.
    """

    def forward(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # the fork has just ended, and its exit status is on the way
            connection.send(bytes([signum]))

    # the fork may be visible to others before this process is ready to forward their signals
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    try:
        request = Request(
            program=program(),
            agent=agent_pid(),
            environment=dict(os.environ),
            arguments=sys.argv,
            folder=str(Path.cwd()),
            processors=sorted(os.sched_getaffinity(0)),
        )
        connection.settimeout(REQUEST_S)
        send_request(connection, request)
        (fork,) = NUMBER.unpack(receive(connection, NUMBER.size))  # from now on signals reach the fork
    except OSError:
        connection.close()  # the fork server kills the fork, if it has made one
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        return
    for signum in FORWARDED:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under `nohup`; the fork ignores it, too
            signal.signal(signum, forward)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
    connection.settimeout(None)
    name_this_process(f"{PROXY_NAME}{fork}")
    _end_as_fork(connection)


def _end_as_fork(connection: socket.socket) -> NoReturn:
    try:
        (status,) = NUMBER.unpack(receive(connection, NUMBER.size))
    except OSError:
        status = signal.SIGKILL  # the fork server is gone, and its forks with it
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum != signal.SIGKILL:  # end by the same signal, as torchrun reports it
            signal.signal(signum, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # only the fork's own core file is useful
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))
