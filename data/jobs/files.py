"""Files that are there whole or not at all: they are written under a temporary name, synced and renamed."""

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

TEMPORARY_SUFFIX: Final = ".tmp"


class DigestFile(io.RawIOBase):
    """A file for writing that computes the SHA-256 and the size of its bytes.

    Closing it only marks the end of the data; `durable_file` closes the file itself.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._digest = hashlib.sha256()
        self.num_bytes = 0
        self.failure: OSError | None = None
        """The error of a failed write, which a library may wrap in another one."""

    def write(self, data: Any) -> int:
        """Append bytes."""
        self._digest.update(data)
        try:
            self._stream.write(data)
        except OSError as error:
            self.failure = error
            raise
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size

    def tell(self) -> int:
        """Bytes written."""
        return self.num_bytes

    def flush(self) -> None:
        """Flush buffers to the kernel."""
        try:
            self._stream.flush()
        except OSError as error:
            self.failure = error
            raise

    def writable(self) -> bool:
        """Yes."""
        return True

    @property
    def sha256(self) -> str:
        """Hex digest of what was written."""
        return self._digest.hexdigest()


@contextmanager
def durable_file(path: Path) -> Iterator[DigestFile]:
    """Write a file atomically and durably.

    Raises:
        OSError: the write failed, even if a library raised another type of error.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY_SUFFIX}")
    written: DigestFile | None = None
    try:
        with temporary.open("wb") as stream:
            written = DigestFile(stream)
            yield written
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        renamed = isinstance(error, Exception) and not isinstance(error, OSError)
        if renamed and written is not None and written.failure is not None:
            raise written.failure from error
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


def remove_leftovers(out: Path) -> None:
    """Remove temporary files of killed processes from the output folder."""
    for path in out.rglob(f"*{TEMPORARY_SUFFIX}"):
        path.unlink(missing_ok=True)
