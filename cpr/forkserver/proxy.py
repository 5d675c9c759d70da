"""The process that torchrun started, as proxy of a fork: forwards signals, and ends as the fork ends."""

import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from cpr.forkserver.protocol import NUMBER, REQUEST_S, Request, program, receive, send_request
from cpr.processes import PROXY_NAME, agent_pid, name_this_process

FORWARDED: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def become_proxy(connection: socket.socket) -> None:
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
