"""The prepared process: waits, forks a worker for each that asks, and sees to it that both end together.

It has one thread and opens nothing but its socket. It lends forks for as long as the agent of its node (or
the `cpr run` above it) lives and no file that it has loaded changes, and stays while one is at work. If it is
killed, its forks end with it.
"""

import ctypes
import os
import select
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from cpr.forkserver.fork_safety import LoadedCode
from cpr.forkserver.protocol import NUMBER, STREAMS, Request, is_same_user, receive_request
from cpr.processes import AGENT_PID, SERVER_NAME, WORKER_NAME, Process, name_this_process

PR_SET_PDEATHSIG: Final = 1
DYING_S: Final = 3.0
"""How long killed forks may take to give their memory back before others start beside them; less than a
borrower waits for its answer."""


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


def serve(listener: socket.socket, launcher: Process, program: list[str]) -> None:
    """Be the prepared process. Returns only in its forks, each of which is then its borrower's worker.

    Args:
        listener: where borrowers ask.
        launcher: it ends with this process.
        program: what it has prepared, and lends to nobody else.
    """
    _detach()
    try:
        _Server(listener, launcher, program).run()
        os._exit(0)
    except _ForkedError as forked:
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
    name_this_process(SERVER_NAME)


def _become(request: Request, streams: list[int]) -> None:
    """In a fork: be the worker that asked."""
    os.setsid()
    name_this_process(WORKER_NAME)
    for stream, theirs in zip(STREAMS, streams, strict=True):
        os.dup2(theirs, stream)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ[AGENT_PID] = f"{request.agent}:{os.getpid()}"
    sys.argv[:] = request.arguments
    sys.orig_argv[:] = [*request.program, *request.arguments[1:]]
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.processors)
    _reseed()


def _reseed() -> None:
    """In a fork: random generators as in a process that has just imported them; Python's own is already."""
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # those of GPUs begin with the same seed everywhere


def _end_with(parent: int) -> None:
    """In a fork: have the kernel kill this process when its parent is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # before it could know
        os.kill(os.getpid(), signal.SIGKILL)


class _Server:
    def __init__(self, listener: socket.socket, launcher: Process, program: list[str]) -> None:
        self._listener = listener
        self._program = program
        self._code = LoadedCode()
        self._selector = selectors.DefaultSelector()
        self._lent: dict[int, _Lent] = {}
        self._launcher = os.pidfd_open(launcher.pid)
        if not launcher.is_alive:
            raise ProcessLookupError("the launcher is gone")
        self._is_open = True
        self._selector.register(listener, selectors.EVENT_READ, self._lend)
        self._selector.register(self._launcher, selectors.EVENT_READ, self._close)

    def run(self) -> None:
        """Lend until the launcher has ended or what was loaded is out of date, and all forks have ended."""
        while self._is_open or self._lent:
            for key, _ in self._selector.select():
                react: Callable[[], None] = key.data
                react()

    def _close(self) -> None:
        """Lend no more. Who asks is refused at once, and somebody else can be what this process was."""
        if self._is_open:
            self._selector.unregister(self._launcher)
            self._selector.unregister(self._listener)
            os.close(self._launcher)
            self._listener.close()
            self._is_open = False

    def _lend(self) -> None:
        if not self._is_open:
            return  # closed in this very round
        borrower, _ = self._listener.accept()
        try:
            if not is_same_user(borrower):
                raise PermissionError("only for processes of the same user")
            request, streams = receive_request(borrower)
        except (OSError, ValueError, TypeError):
            borrower.close()
            return
        if self._code.changed():
            self._close()
        if self._is_open and request.program == self._program:
            self._bury()
            self._fork(borrower, request, streams)
        else:
            borrower.close()
        for stream in streams:
            os.close(stream)

    def _fork(self, borrower: socket.socket, request: Request, streams: list[int]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            _end_with(server)
            self._let_go()
            borrower.close()
            raise _ForkedError(request, streams)
        lent = _Lent(pid, os.pidfd_open(pid), borrower)
        self._lent[pid] = lent
        self._selector.register(lent.process, selectors.EVENT_READ, lambda: self._on_end(lent))
        self._selector.register(borrower, selectors.EVENT_READ, lambda: self._on_word(lent))
        _tell(lent, pid)

    def _bury(self) -> None:
        """Wait for forks whose borrowers are gone: the next generation must not meet them."""
        dying = [
            lent for lent in self._lent.values() if _is_ready(lent.borrower.fileno(), select.POLLRDHUP, 0)
        ]
        for lent in dying:
            signal.pidfd_send_signal(lent.process, signal.SIGKILL)
        deadline = time.monotonic() + DYING_S
        for lent in dying:
            _is_ready(lent.process, select.POLLIN, max(0.0, deadline - time.monotonic()))

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
        self._listener.close()
        os.close(self._launcher)
        for lent in self._lent.values():
            os.close(lent.process)
            lent.borrower.close()


def _tell(lent: _Lent, number: int) -> None:
    try:
        lent.borrower.sendall(NUMBER.pack(number))
    except OSError:
        return  # it is gone, which its end of the connection says as well


def _is_ready(file: int, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(timeout_s * 1000))
