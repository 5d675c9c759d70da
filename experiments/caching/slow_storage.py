"""Slow storage for experiments: local files behind a stated latency and bandwidth.

Such a storage replaces a data set on remote storage. A request takes the latency and then the time of its
bytes, however fast the local disk is, and requests for one file run one after the other. As a real pyarrow
filesystem, it works with all code that reads through one.
"""

import io
import time
from pathlib import Path

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from pyarrow import fs


class _SlowFile(io.FileIO):
    """A local file with reads as slow as over a network."""

    def __init__(self, path: str, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(path, "rb")
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

    def read(self, size: int | None = -1) -> bytes:
        asked_s = time.monotonic()
        content = super().read(-1 if size is None else size) or b""
        arrives_s = asked_s + self._latency_s + len(content) / self._bytes_per_s
        time.sleep(max(0.0, arrives_s - time.monotonic()))
        return content

    def size(self) -> int:
        return Path(str(self.name)).stat().st_size


class _SlowHandler(fs.FSSpecHandler):  # type: ignore[misc]  # pyarrow is untyped
    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(LocalFileSystem())
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(_SlowFile(path, self._latency_s, self._bytes_per_s), mode="r")


def slow_filesystem(*, latency_s: float, bytes_per_s: float) -> fs.PyFileSystem:
    """A pyarrow filesystem of local files that delays every read.

    Args:
        latency_s: time before the first byte of each request, in seconds.
        bytes_per_s: bandwidth of one stream of requests.
    """
    return fs.PyFileSystem(_SlowHandler(latency_s, bytes_per_s))
