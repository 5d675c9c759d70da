"""A storage for failure injection, which fails, kills its process, or is slow."""

import errno
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, NoReturn, Self

from cpr.checkpoint.storage.explain import explained
from cpr.faults.kinds import KILL, READING, Operation, StorageDelay, StorageError, StorageOutage

if TYPE_CHECKING:  # pyarrow is slow to import, and not needed without failures
    from cpr.checkpoint.storage.base import Sink, Storage


class FaultyStorage:
    """A storage with faults, which raise `CheckpointError` with file and cause as real ones do.

    It passes all operations on to another storage.
    """

    def __init__(self, inner: "Storage") -> None:
        self.inner = inner
        self.uri, self.readers = inner.uri, inner.readers
        self._faults: list[tuple[StorageError | StorageDelay, count[int]]] = []
        """With a counter of the operations that it is about."""
        self._outages: list[tuple[StorageOutage, float]] = []

    def inject(self, kind: StorageError | StorageDelay) -> Self:
        """Add a fault, which counts operations from now on."""
        self._faults.append((kind, count(1)))
        return self

    def fail(
        self,
        operation: Operation,
        path: str = "",
        *,
        at: int = 1,
        number: int = errno.ENOSPC,
        lasting: bool = False,
    ) -> Self:
        """Add a `StorageError` with this `errno`."""
        error = errno.errorcode[number]
        return self.inject(StorageError(operation=operation, path=path, at=at, lasting=lasting, error=error))

    def out(self, kind: StorageOutage, until: float) -> None:
        """Start an outage until this time, in seconds since the epoch."""
        self._outages.append((kind, until))

    def heal(self) -> None:
        """Remove all faults and outages."""
        self._faults.clear()
        self._outages.clear()

    @contextmanager
    def create(self, path: str) -> Iterator["Sink"]:
        """See `Storage.create`."""
        self.before("create", path)
        with self.inner.create(path) as sink:
            yield _FaultySink(self, sink, path)
            self.before("commit", path)
        self.before("committed", path)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Storage.read_into`."""
        self.before("read", path)
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

    def before(self, operation: Operation, path: str) -> None:
        """Apply the outages and faults of an operation."""
        for outage, until in tuple(self._outages):
            left_s = until - time.time()
            if left_s <= 0 or (operation in READING and not outage.reads):
                continue
            if outage.how == "fail":
                _fail(outage.error, operation, path)
            time.sleep(left_s)
        for fault, counter in tuple(self._faults):
            if operation != fault.operation or fault.path not in path:
                continue
            number = next(counter)  # in one step, as several threads write
            if number == fault.at or (fault.lasting and number > fault.at):
                _apply(fault, operation, path)


class _FaultySink:
    def __init__(self, storage: FaultyStorage, sink: "Sink", path: str) -> None:
        self._storage, self._sink, self._path = storage, sink, path

    def write(self, data: memoryview) -> None:
        self._storage.before("write", self._path)
        self._sink.write(data)


def _apply(fault: StorageError | StorageDelay, operation: Operation, path: str) -> None:
    if isinstance(fault, StorageDelay):
        time.sleep(fault.delay_s)
    elif fault.error == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        _fail(fault.error, operation, path)


def _fail(error: str, operation: Operation, path: str) -> NoReturn:
    """Raise a `CheckpointError` as a real storage does, naming the file."""
    number = getattr(errno, error)
    with explained("reading" if operation in {"read", "size"} else "writing", path):
        raise OSError(number, os.strerror(number))
