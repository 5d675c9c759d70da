"""Storages that misbehave, for tests of everything that writes or reads through one."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from cpr.checkpoint.causes import explained
from cpr.checkpoint.storage import Sink, Storage

OPERATIONS = ("create", "write", "commit", "committed", "read", "size", "list", "delete")
"""`commit` is between a file's last byte and its appearance, `committed` right after that."""


@dataclass
class Fault:
    """Something that goes wrong once, at the n-th operation from now on whose path contains `path`."""

    operation: str
    path: str
    countdown: int
    number: int
    """An errno, or 0: the process is killed with -9."""
    lasting: bool
    """Whether all that come later fail, too, as on a full disk."""
    num_hits: int = 0

    def meet(self, operation: str, path: str, count: int = 1) -> None:
        """Fail, if it is time to."""
        if operation != self.operation or self.path not in path:
            return
        self.countdown -= count
        if self.countdown > 0 or (self.num_hits and not self.lasting):
            return
        self.num_hits += 1
        if self.number == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        with explained("reading" if operation in {"read", "size"} else "writing", path):
            raise OSError(self.number, os.strerror(self.number))


class Wrapped:
    """Passes everything on to another storage; what the others here change."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.uri = inner.uri

    def meet(self, operation: str, path: str, count: int = 1) -> None:
        """Called at every operation, before it takes place; `count` is the number of bytes of a write."""

    @contextmanager
    def create(self, path: str) -> Iterator[Sink]:
        self.meet("create", path)
        with self.inner.create(path) as sink:
            yield WrappedSink(self, sink, path)
            self.meet("commit", path)
        self.meet("committed", path)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.meet("read", path, buffer.nbytes)
        self.inner.read_into(path, offset, buffer)

    def size(self, path: str) -> int:
        self.meet("size", path)
        return self.inner.size(path)

    def list(self, folder: str = "") -> Iterator[str]:
        self.meet("list", folder)
        return self.inner.list(folder)

    def delete(self, path: str) -> None:
        self.meet("delete", path)
        self.inner.delete(path)

    def alone(self) -> AbstractContextManager[bool]:
        return self.inner.alone()


class WrappedSink:
    def __init__(self, storage: Wrapped, sink: Sink, path: str) -> None:
        self._storage, self._sink, self._path = storage, sink, path

    def write(self, data: memoryview) -> None:
        self._storage.meet("write", self._path, data.nbytes)
        self._sink.write(data)


class FaultyStorage(Wrapped):
    """Fails when it is told to, as a real one does: with `CheckpointError`, naming file and cause.

    `FaultyStorage(inner).fail("write", at=3)`, `.fail("write", after_bytes=10**6, lasting=True)`, or, in a
    process of its own, `.kill("commit", "manifest.json")`.
    """

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.faults: list[tuple[Fault, bool]] = []

    def fail(
        self,
        operation: str,
        path: str = "",
        *,
        at: int = 1,
        after_bytes: int | None = None,
        number: int = errno.ENOSPC,
        lasting: bool = False,
    ) -> "FaultyStorage":
        """Fail at the `at`-th such operation, or at the write or read that reaches `after_bytes`."""
        assert operation in OPERATIONS
        countdown = at if after_bytes is None else after_bytes
        self.faults.append((Fault(operation, path, countdown, number, lasting), after_bytes is not None))
        return self

    def kill(self, operation: str, path: str = "", *, at: int = 1) -> "FaultyStorage":
        """Kill this process with -9 at the `at`-th such operation."""
        return self.fail(operation, path, at=at, number=0)

    def heal(self) -> None:
        """No more faults."""
        self.faults.clear()

    def meet(self, operation: str, path: str, count: int = 1) -> None:
        for fault, counts_bytes in list(self.faults):
            fault.meet(operation, path, count if counts_bytes else 1)


class SlowStorage(Wrapped):
    """Takes its time at every operation, or stands still altogether while its gate is closed."""

    def __init__(self, inner: Storage, delay_s: float = 0.0) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        """Set once somebody stands before the closed gate."""

    def meet(self, operation: str, path: str, count: int = 1) -> None:
        time.sleep(self.delay_s)
        if not self.gate.is_set():
            self.waiting.set()
            assert self.gate.wait(60), "the test never opened the gate"
