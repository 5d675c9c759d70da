"""The process that torchrun started and that stands for a fork of the prepared one: signals in, end out."""

import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

from cpr.agent import AGENT_PID
from cpr.standby.names import STAND_IN, name_this_process
from cpr.standby.wire import NUMBER, REQUEST_S, Agent, Request, receive, send_request

PASSED_ON: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)


def borrow(connection: socket.socket, agent: Agent) -> None:
    """Have a fork of the prepared process do this process's work, and end as it does.

    Returns only if the prepared process does not answer; then nobody works, and this process must.
    """

    def pass_on(signum: int, frame: FrameType | None) -> None:
        connection.send(bytes([signum]))

    request = Request(
        environment={**os.environ, AGENT_PID: str(agent[0])}, arguments=sys.argv, folder=str(Path.cwd())
    )
    previous = {}
    try:
        connection.settimeout(REQUEST_S)
        send_request(connection, request)
        (fork,) = NUMBER.unpack(receive(connection, NUMBER.size))  # it lives, and signals reach it
        for signum in PASSED_ON:
            previous[signum] = signal.signal(signum, pass_on)
    except OSError:
        connection.close()  # the prepared process kills what it may have forked
        return
    connection.settimeout(None)
    name_this_process(f"{STAND_IN}{fork}")
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
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))
