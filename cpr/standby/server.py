"""The prepared process: waits, forks a worker for each that asks, and sees to it that both end together.

It has one thread and opens nothing but its socket. It lives as long as the agent of its node, or a fork of
it.
"""

import ctypes
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cpr.agent import start_ticks
from cpr.standby.names import PREPARED, WORKER, name_this_process
from cpr.standby.wire import NUMBER, STREAMS, Agent, Request, is_same_user, receive_request

PR_SET_PDEATHSIG: Final = 1


@dataclass(frozen=True)
class _Lent:
    """A fork at work, and whom it works for."""

    pid: int
    process: int
    """Its descriptor, which stays that process's when the pid is another's."""
    borrower: socket.socket


class _ForkedError(BaseException):
    """Raised in a fork, to leave the server's loop with the request of its borrower."""

    def __init__(self, request: Request, streams: list[int]) -> None:
        super().__init__()
        self.request = request
        self.streams = streams


def serve(listener: socket.socket, agent: Agent) -> None:
    """Be the prepared process. Returns only in its forks, each of which is then its borrower's worker."""
    _detach()
    try:
        _Server(listener, agent).run()
        os._exit(0)
    except _ForkedError as forked:
        listener.close()
        _become(forked.request, forked.streams)
    except BaseException:
        os._exit(1)  # borrowers see their connections end, and workers start by themselves from then on


def _detach() -> None:
    """Leave the worker's session and streams: who waits for a run's output must not wait for this process."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in STREAMS:
        os.dup2(nothing, stream)
    os.close(nothing)
    name_this_process(PREPARED)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


def _become(request: Request, streams: list[int]) -> None:
    """In a fork: be the worker that asked."""
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    name_this_process(WORKER)
    for stream, theirs in zip(STREAMS, streams, strict=True):
        os.dup2(theirs, stream)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv[:] = request.arguments
    os.chdir(request.folder)


class _Server:
    def __init__(self, listener: socket.socket, agent: Agent) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._lent: dict[int, _Lent] = {}
        pid, start = agent
        self._agent: int | None = os.pidfd_open(pid)
        if start_ticks(pid) != start:
            raise ProcessLookupError("the agent is gone")
        self._selector.register(listener, selectors.EVENT_READ, self._lend)
        self._selector.register(self._agent, selectors.EVENT_READ, self._on_agents_end)

    def run(self) -> None:
        """Serve until the agent and all forks have ended."""
        while self._agent is not None or self._lent:
            for key, _ in self._selector.select():
                react: Callable[[], None] = key.data
                react()

    def _on_agents_end(self) -> None:
        assert self._agent is not None
        self._selector.unregister(self._agent)
        self._selector.unregister(self._listener)
        os.close(self._agent)
        self._agent = None

    def _lend(self) -> None:
        borrower, _ = self._listener.accept()
        try:
            if not is_same_user(borrower):
                raise PermissionError("only for processes of the same user")
            request, streams = receive_request(borrower)
        except (OSError, ValueError):
            borrower.close()
            return
        pid = os.fork()
        if pid == 0:
            self._let_go()
            borrower.close()
            raise _ForkedError(request, streams)
        for stream in streams:
            os.close(stream)
        lent = _Lent(pid, os.pidfd_open(pid), borrower)
        self._lent[pid] = lent
        self._selector.register(lent.process, selectors.EVENT_READ, lambda: self._on_end(lent))
        self._selector.register(borrower, selectors.EVENT_READ, lambda: self._on_word(lent))
        _tell(lent, pid)

    def _on_word(self, lent: _Lent) -> None:
        """The borrower passes a signal on, or is gone, and its worker with it."""
        if lent.pid not in self._lent:
            return  # it ended in this very round
        try:
            signums = lent.borrower.recv(16)
        except OSError:
            signums = b""
        if not signums:
            self._selector.unregister(lent.borrower)
        for signum in signums or bytes([signal.SIGKILL]):
            signal.pidfd_send_signal(lent.process, signum)

    def _on_end(self, lent: _Lent) -> None:
        _, status = os.waitpid(lent.pid, 0)
        _tell(lent, status)
        del self._lent[lent.pid]
        if lent.borrower in self._selector.get_map():
            self._selector.unregister(lent.borrower)
        self._selector.unregister(lent.process)
        os.close(lent.process)
        lent.borrower.close()

    def _let_go(self) -> None:
        """In a fork: close what belongs to the server alone."""
        self._selector.close()
        if self._agent is not None:
            os.close(self._agent)
        for lent in self._lent.values():
            os.close(lent.process)
            lent.borrower.close()


def _tell(lent: _Lent, number: int) -> None:
    try:
        lent.borrower.sendall(NUMBER.pack(number))
    except OSError:
        return  # it is gone, which its end of the connection says as well
