"""The fork server: forks a worker for each proxy that asks, and makes both end together.

It has one thread and opens nothing but its socket. It makes forks as long as its node's agent (or the `cpr
run` above the agent) lives and no file that it has loaded changes, and stays until its last fork has ended.
If it is killed, its forks end with it.

A fork contains only the thread that forks: locks and work of other threads are lost in it, and a CUDA context
does not work there. A fork also has the code of the time of its imports: if a file was edited since, a worker
that started by itself would have the new code, and so must a fork.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cpr.forkserver.protocol import NUMBER, STREAMS, Request, is_same_user, receive_request
from cpr.processes import AGENT_PID, SERVER_NAME, WORKER_NAME, Process, name_this_process

STARTED_NS: Final = time.time_ns()
"""Time at which this module was imported, before everything that is prepared."""

HARMLESS_THREADS: Final = frozenset({"jemalloc_bg_thd"})
"""By name. Arrow's allocator locks itself for a fork and does without its thread in it."""

CUDA_ERROR_NOT_INITIALIZED: Final = 3
PR_SET_PDEATHSIG: Final = 1
DYING_S: Final = 3.0
"""Time for killed forks to free their memory before new ones start; shorter than a proxy waits for its
answer."""


@dataclass(frozen=True)
class _Fork:
    """A working fork and its proxy."""

    pid: int
    pidfd: int
    """Descriptor of the process, which stays valid if the pid is reused."""
    proxy: socket.socket

    def send(self, number: int) -> None:
        """Send a number to the proxy, unless it is gone, which the end of the connection shows as well."""
        try:
            self.proxy.sendall(NUMBER.pack(number))
        except OSError:
            return


class _ForkedError(BaseException):
    """Raised in a fork to leave the server's loop, with the request of its proxy."""

    def __init__(self, request: Request, streams: list[int]) -> None:
        super().__init__()
        self.request = request
        self.streams = streams


def serve(listener: socket.socket, launcher: Process, program: list[str]) -> None:
    """Run the fork server in this process. Returns only in its forks, which are then workers.

    It ends with the launcher, and refuses proxies of other programs than the prepared one.
    """
    # leaves the worker's session and streams: a reader of a run's output must not wait for the fork server
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for stream in STREAMS:
        os.dup2(null, stream)
    os.close(null)
    name_this_process(SERVER_NAME)
    try:
        _Server(listener, launcher, program).run()
        os._exit(0)
    except _ForkedError as forked:
        _become_worker(forked.request, forked.streams)
    except BaseException:
        os._exit(1)  # proxies see their connections end; from then on workers start by themselves


def _become_worker(request: Request, streams: list[int]) -> None:
    """In a fork: take over the session, streams, environment and command line of the request."""
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
    # random generators as after a fresh import; Python's own is reseeded by the fork
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()  # those of GPUs have the same initial seed everywhere


class _Server:
    def __init__(self, listener: socket.socket, launcher: Process, program: list[str]) -> None:
        self._listener = listener
        self._program = program
        self._code = LoadedCode()
        self._selector = selectors.DefaultSelector()
        self._forks: dict[int, _Fork] = {}
        self._launcher = os.pidfd_open(launcher.pid)
        if not launcher.is_alive:
            raise ProcessLookupError("the launcher is gone")
        self._is_open = True
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._launcher, selectors.EVENT_READ, self._close)

    def run(self) -> None:
        """Serve until the launcher has ended or loaded code is out of date, and all forks have ended."""
        while self._is_open or self._forks:
            for key, _ in self._selector.select():
                react: Callable[[], None] = key.data
                react()

    def _close(self) -> None:
        """Make no more forks. New proxies are refused at once, and a new fork server can take the address."""
        if self._is_open:
            self._selector.unregister(self._launcher)
            self._selector.unregister(self._listener)
            os.close(self._launcher)
            self._listener.close()
            self._is_open = False

    def _accept(self) -> None:
        if not self._is_open:
            return  # closed in this round of events
        proxy, _ = self._listener.accept()
        try:
            if not is_same_user(proxy):
                raise PermissionError("only for processes of the same user")
            request, streams = receive_request(proxy)
        except (OSError, ValueError, TypeError):
            proxy.close()
            return
        if self._code.changed():  # checked at each request, as files may be edited between generations
            self._close()
        if self._is_open and request.program == self._program:
            self._wait_for_dying_forks()
            self._fork(proxy, request, streams)
        else:
            proxy.close()
        for stream in streams:
            os.close(stream)

    def _fork(self, proxy: socket.socket, request: Request, streams: list[int]) -> None:
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            # the kernel kills the fork when the server dies
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != server:  # which died before the call above
                os.kill(os.getpid(), signal.SIGKILL)
            self._release()
            proxy.close()
            raise _ForkedError(request, streams)
        fork = self._forks[pid] = _Fork(pid, os.pidfd_open(pid), proxy)
        self._selector.register(fork.pidfd, selectors.EVENT_READ, lambda: self._on_end(fork))
        self._selector.register(proxy, selectors.EVENT_READ, lambda: self._on_signal(fork))
        fork.send(pid)

    def _wait_for_dying_forks(self) -> None:
        """Kill forks whose proxies are gone, and wait for their end to free their memory."""
        dying = [fork for fork in self._forks.values() if _is_ready(fork.proxy.fileno(), select.POLLRDHUP, 0)]
        for fork in dying:
            signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
        deadline = time.monotonic() + DYING_S
        for fork in dying:
            _is_ready(fork.pidfd, select.POLLIN, max(0.0, deadline - time.monotonic()))

    def _on_signal(self, fork: _Fork) -> None:
        """Pass the proxy's signals to the fork; kill the fork if the proxy is gone."""
        if fork.pid not in self._forks:
            return  # ended in this round of events
        try:
            signums = fork.proxy.recv(16)
        except OSError:
            signums = b""
        if not signums:
            self._selector.unregister(fork.proxy)
        for signum in signums or bytes([signal.SIGKILL]):
            signal.pidfd_send_signal(fork.pidfd, signum)

    def _on_end(self, fork: _Fork) -> None:
        _, status = os.waitpid(fork.pid, 0)
        fork.send(status)
        del self._forks[fork.pid]
        if fork.proxy in self._selector.get_map():
            self._selector.unregister(fork.proxy)
        self._selector.unregister(fork.pidfd)
        os.close(fork.pidfd)
        fork.proxy.close()

    def _release(self) -> None:
        """In a fork: close what belongs to the server only."""
        self._selector.close()
        self._listener.close()
        os.close(self._launcher)
        for fork in self._forks.values():
            os.close(fork.pidfd)
            fork.proxy.close()


def _is_ready(file: int, event: int, timeout_s: float) -> bool:
    poll = select.poll()
    poll.register(file, event)
    return bool(poll.poll(timeout_s * 1000))


def why_not_to_fork() -> str | None:
    """What a fork of this process would lose or break; None if nothing.

    Call it in the parent right after a fork: libraries such as OpenBLAS end their threads for one.
    """
    threads = []
    for thread in Path("/proc/self/task").iterdir():
        if thread.name != str(os.getpid()):
            with suppress(OSError):  # it has just ended
                threads.append((thread / "comm").read_text().strip())
    if others := sorted(set(threads) - HARMLESS_THREADS):
        return f"other threads run in it ({', '.join(others)})"
    if _cuda_is_initialized():
        return "CUDA is initialized in it"
    return None


def _cuda_is_initialized() -> bool:
    """Whether the driver's `cuInit` was called, asked without initializing CUDA."""
    loaded = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    driver = next((line[5] for line in loaded if len(line) == 6 and "/libcuda.so" in line[5]), None)
    if driver is None:
        return False
    num_devices = ctypes.c_int()
    return bool(ctypes.CDLL(driver).cuDeviceGetCount(ctypes.byref(num_devices)) != CUDA_ERROR_NOT_INITIALIZED)


class LoadedCode:
    """Snapshot of the files of all loaded modules."""

    def __init__(self) -> None:
        files: set[str | None] = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
        self._stamps = {file: _stamp(file) for file in files if file}

    def changed(self) -> str | None:
        """A file that differs from the loaded one; None if there is none.

        Files written after the process began count as changed, as they may have been read before.
        """
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp or (stamp is not None and stamp[0] >= STARTED_NS):
                return file
        return None


def _stamp(file: str) -> tuple[int, int, int] | None:
    """Time of the last change in ns, size in bytes, and inode; None if there is no such file."""
    try:
        status = os.stat(file)  # noqa: PTH116  # a Path would be slow for thousands of files
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
