"""The storage interface: few methods behind which local disks and object stores look alike.

Paths are relative, with `/`. `open_storage` gives the implementation for a URI.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

import xxhash

from cpr.checkpoint.storage.arrow import ArrowStorage
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import CorruptFileError

SMALL_FILE_BYTES: Final = 2**30
"""Limit of `read_file`: a manifest of this size names millions of chunks, so tens of terabytes of rows."""


class Sink(Protocol):
    """A file that is being written; it appears under its name, durable, once its block ends without error."""

    def write(self, data: memoryview) -> None:
        """Append bytes; the memory may be reused as soon as this returns."""


class HashingSink:
    """Passes bytes on to another sink, and counts and hashes them on the way; a file for Arrow's writers."""

    closed = False

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._hash = xxhash.xxh3_128()
        self.num_bytes = 0

    def write(self, data: Any) -> None:
        """Append bytes, of any object that has a buffer."""
        view = memoryview(data).cast("B")
        self._hash.update(view)
        self.num_bytes += view.nbytes
        self._sink.write(view)

    def digest(self) -> str:
        """XXH3-128 of all bytes so far, in hex."""
        return self._hash.hexdigest()


class Storage(Protocol):
    """A directory on a local disk, a shared file system or an object store.

    Every method raises `CheckpointError` with the file's name, the cause and what to do
    (`CorruptFileError` where a file is missing or shorter than asked). Any thread may call any of them.
    """

    uri: str
    """Shown in messages; without credentials."""
    readers: int
    """Threads of a process that read it fastest."""

    def create(self, path: str) -> AbstractContextManager[Sink]:
        """Write a file atomically: temporary name, sync, rename; or one upload.

        Missing folders are made. An existing file is replaced. On an error nothing is left behind.
        """

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable bytes) from `offset` of the file; the file must have that many bytes."""

    def size(self, path: str) -> int:
        """Size of a file in bytes."""

    def list(self, folder: str = "") -> Iterator[str]:
        """Names of files and folders directly inside `folder`, sorted; none when there is no such folder."""

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with all its content; no error when it does not exist."""


def read_file(storage: Storage, path: str) -> bytes:
    """Read a whole small file.

    Raises:
        CorruptFileError: the file is missing, became shorter meanwhile, or is larger than `SMALL_FILE_BYTES`.
        CheckpointError: the storage fails.
    """
    size = storage.size(path)
    if size > SMALL_FILE_BYTES:
        raise CorruptFileError(f"{storage.uri}/{path} has {size} bytes: no file of that name is so large")
    data = bytearray(size)
    storage.read_into(path, 0, memoryview(data))
    return bytes(data)


def open_storage(uri: str) -> Storage:
    """Open the storage for a path, or for any URI that pyarrow knows.

    Args:
        uri: `runs/a`, `file:///runs/a`, `s3://bucket/prefix?region=..`, `gs://..`, `hdfs://..`, `abfs://..`.

    Raises:
        ValueError: no storage can be opened for this URI.
        CheckpointError: the store cannot be reached.
    """
    if uri.startswith("file://"):
        uri = unquote(urlsplit(uri).path)
    return LocalStorage(uri) if is_local(uri) else ArrowStorage(uri)


def is_local(uri: str) -> bool:
    """Whether `open_storage` gives a directory of this machine's file systems, as far as the URI says."""
    return "://" not in uri or uri.startswith("file://")
