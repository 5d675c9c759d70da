"""Storages for failure injection, which fail, kill their process, are slow, or hang."""

import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NoReturn

from cpr.checkpoint.storage.explain import explained
from cpr.faults.kinds import OPERATIONS, READING, StorageOutage

if TYPE_CHECKING:  # pyarrow is slow to import, and not needed without failures
    from cpr.checkpoint.storage.base import Sink, Storage

GATE_S: Final = 60.0
"""Longest wait of an operation for a closed gate."""


@dataclass
class Fault:
    """A fault at the n-th operation from now on whose path contains `path`."""

    operation: str
    path: str = ""
    countdown: int = 1
    counts_bytes: bool = False
    number: int = 0
    """An errno; 0: no error."""
    kills: bool = False
    delay_s: float = 0.0
    lasting: bool = False
    """Whether all later operations are affected, too, as on a full disk."""
    num_hits: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def __post_init__(self) -> None:
        assert self.operation in OPERATIONS

    def before(self, operation: str, path: str, num_bytes: int) -> None:
        """Apply the fault to an operation, if it is due."""
        if operation != self.operation or self.path not in path:
            return
        with self._lock:
            self.countdown -= num_bytes if self.counts_bytes else 1
            if self.countdown > 0 or (self.num_hits and not self.lasting):
                return
            self.num_hits += 1
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.delay_s)
        if self.number:
            _fail(self.number, operation, path)


@dataclass(frozen=True)
class ActiveOutage:
    """An outage with its end: all operations fail or hang until then."""

    kind: StorageOutage
    until: float
    """Seconds since the epoch."""

    def before(self, operation: str, path: str) -> None:
        """Fail or wait, unless the outage is over or spares this operation."""
        left_s = self.until - time.time()
        if left_s <= 0 or (operation in READING and not self.kind.reads):
            return
        if self.kind.how == "hang":
            time.sleep(left_s)
        else:
            _fail(getattr(errno, self.kind.error), operation, path)


def _fail(number: int, operation: str, path: str) -> NoReturn:
    """Raise a `CheckpointError` as a real storage does, naming the file."""
    with explained("reading" if operation in {"read", "size"} else "writing", path):
        raise OSError(number, os.strerror(number))


class WrappedStorage:
    """A storage that passes all operations on to another one; subclasses override `before`."""

    def __init__(self, inner: "Storage") -> None:
        self.inner = inner
        self.uri = inner.uri

    def before(self, operation: str, path: str, num_bytes: int = 1) -> None:
        """Hook called before every operation (see `OPERATIONS`)."""

    @contextmanager
    def create(self, path: str) -> Iterator["Sink"]:
        """See `Storage.create`."""
        self.before("create", path)
        with self.inner.create(path) as sink:
            yield _WrappedSink(self, sink, path)
            self.before("commit", path)
        self.before("committed", path)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Storage.read_into`."""
        self.before("read", path, buffer.nbytes)
        self.inner.read_into(path, offset, buffer)

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        self.before("size", path)
        return self.inner.size(path)

    def list(self, folder: str = "") -> Iterator[str]:
        """See `Storage.list`."""
        self.before("list", folder)
        return self.inner.list(folder)

    def delete(self, path: str) -> None:
        """See `Storage.delete`."""
        self.before("delete", path)
        self.inner.delete(path)


class _WrappedSink:
    def __init__(self, storage: WrappedStorage, sink: "Sink", path: str) -> None:
        self._storage, self._sink, self._path = storage, sink, path

    def write(self, data: memoryview) -> None:
        self._storage.before("write", self._path, data.nbytes)
        self._sink.write(data)


class FaultyStorage(WrappedStorage):
    """A storage with faults, which raise `CheckpointError` with file and cause as real ones do.

    `FaultyStorage(inner).fail("write", at=3)`, `.fail("write", after_bytes=10**6, lasting=True)`,
    `.slow("read", delay_s=2.0)`, or, in a process of its own, `.kill("commit", "manifest.json")`.
    """

    def __init__(self, inner: "Storage") -> None:
        super().__init__(inner)
        self.faults: list[Fault] = []
        self.outages: list[ActiveOutage] = []

    def out(self, kind: StorageOutage, until: float) -> None:
        """Start an outage until this time, in seconds since the epoch."""
        self.outages.append(ActiveOutage(kind, until))

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
        countdown = at if after_bytes is None else after_bytes
        counts_bytes = after_bytes is not None
        return self._add(
            Fault(operation, path, countdown, counts_bytes=counts_bytes, number=number, lasting=lasting)
        )

    def kill(self, operation: str, path: str = "", *, at: int = 1) -> "FaultyStorage":
        """Kill this process (-9) at the `at`-th such operation."""
        return self._add(Fault(operation, path, at, kills=True))

    def slow(
        self, operation: str, path: str = "", *, delay_s: float, at: int = 1, lasting: bool = False
    ) -> "FaultyStorage":
        """Delay the `at`-th such operation by `delay_s`."""
        return self._add(Fault(operation, path, at, delay_s=delay_s, lasting=lasting))

    def heal(self) -> None:
        """Remove all faults and outages."""
        self.faults.clear()
        self.outages.clear()

    def before(self, operation: str, path: str, num_bytes: int = 1) -> None:
        """See `WrappedStorage.before`."""
        for outage in list(self.outages):
            outage.before(operation, path)
        for fault in list(self.faults):
            fault.before(operation, path, num_bytes)

    def _add(self, fault: Fault) -> "FaultyStorage":
        self.faults.append(fault)
        return self


class SlowStorage(WrappedStorage):
    """A storage with a delay at every operation, which hangs while its gate is closed."""

    def __init__(self, inner: "Storage", delay_s: float = 0.0) -> None:
        super().__init__(inner)
        self.delay_s = delay_s
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = threading.Event()
        """Set once an operation waits for the closed gate."""

    def before(self, operation: str, path: str, num_bytes: int = 1) -> None:
        """See `WrappedStorage.before`."""
        time.sleep(self.delay_s)
        if not self.gate.is_set():
            self.waiting.set()
            if not self.gate.wait(GATE_S):
                raise TimeoutError(f"the gate of {self.uri} was not opened within {GATE_S:g} s")
