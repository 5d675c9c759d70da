"""Files that are there whole or not at all.

On a local disk they are written under a temporary name, synced and renamed. An object store shows a file when
its upload ends; an upload whose process died stays invisible there, until a lifecycle rule of the bucket
(`AbortIncompleteMultipartUpload`) removes what the store keeps of it.
"""

import hashlib
import io
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from pyarrow import fs

from data.jobs.location import Location

TEMPORARY_SUFFIX: Final = ".tmp"
SENT_BYTES: Final = 4 << 20
"""Bytes of a file that are handed to a store at once."""


class DigestFile(io.RawIOBase):
    """A file for writing that computes the SHA-256 and the size of its bytes.

    Closing it only marks the end of the data; `durable_file` closes the file itself.
    """

    def __init__(self, stream: IO[bytes]) -> None:
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
def durable_file(place: Path | Location) -> Iterator[DigestFile]:
    """Write a file atomically and durably, over another one if there is one.

    Raises:
        OSError: the write failed, even if a library raised another type of error.
    """
    location = Location.of(place)
    local = location.local
    with _renamed_at_end(local) if local is not None else _sent_at_end(location) as written:
        try:
            yield written
        except Exception as error:
            if written.failure is not None and not isinstance(error, OSError):
                raise written.failure from error
            raise


@contextmanager
def _renamed_at_end(path: Path) -> Iterator[DigestFile]:
    path.parent.mkdir(parents=True, exist_ok=True)
    # on a shared folder, processes of two machines may have the same id
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as stream:
            yield DigestFile(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # makes the new name durable
    finally:
        os.close(folder)


@contextmanager
def _sent_at_end(location: Location) -> Iterator[DigestFile]:
    """Write to a local temporary file, and send it when it is whole.

    pyarrow cannot abort an upload: a stream that is dropped after an error would end it, cut off.
    """
    with tempfile.TemporaryFile() as stream:
        yield DigestFile(stream)
        stream.flush()
        stream.seek(0)
        system, path = location.filesystem, location.path
        if location.is_object_store:
            _send(stream, system, path)
            return
        temporary = f"{path}.{secrets.token_hex(6)}{TEMPORARY_SUFFIX}"
        system.create_dir(path.rpartition("/")[0])
        _send(stream, system, temporary)
        system.move(temporary, path)


def _send(stream: IO[bytes], system: fs.FileSystem, path: str) -> None:
    with system.open_output_stream(path) as target:
        shutil.copyfileobj(stream, target, SENT_BYTES)


def described(file: Location) -> dict[str, Any]:
    """The manifest's entry about a file: path, size and digest."""
    with file.open() as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"path": file.inner, "num_bytes": file.size(), "sha256": digest}


def remove_leftovers(out: Location) -> None:
    """Remove temporary files of killed processes from the output folder."""
    if out.local is not None:
        for path in out.local.rglob(f"*{TEMPORARY_SUFFIX}"):
            path.unlink(missing_ok=True)
    elif not out.is_object_store:
        for name in out.sizes():
            if name.endswith(TEMPORARY_SUFFIX):
                (out / name).delete()
