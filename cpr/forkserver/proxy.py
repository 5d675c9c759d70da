"""The process that torchrun started and that stands for a fork of the prepared one: signals in, end out."""

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

PASSED_ON: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def borrow(connection: socket.socket) -> None:
    """Have a fork of the prepared process do this process's work, and end as it does.

    Returns only if the prepared process does not answer, or refuses because files of the program have changed
    since; then nobody works, and this process must.
    """

    def pass_on(signum: int, frame: FrameType | None) -> None:
        with suppress(OSError):  # the worker has just ended; how, is on its way
            connection.send(bytes([signum]))

    # the fork may tell others that it is there before this process is ready to pass their signals on
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
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
        (fork,) = NUMBER.unpack(receive(connection, NUMBER.size))  # it lives, and signals reach it
    except OSError:
        connection.close()  # the prepared process kills what it may have forked
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        return
    for signum in PASSED_ON:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as `nohup` asks, and the fork ignores it too
            signal.signal(signum, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
    connection.settimeout(None)
    name_this_process(f"{PROXY_NAME}{fork}")
    _end_like_it(connection)


def _end_like_it(connection: socket.socket) -> NoReturn:
    try:
        (status,) = NUMBER.unpack(receive(connection, NUMBER.size))
    except OSError:
        status = signal.SIGKILL  # the prepared process is gone, and its forks with it
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the worker's own core file is the telling one
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))
