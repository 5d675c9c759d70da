"""Storage in an object store or any other place that pyarrow has a file system for."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pyarrow.fs

from cpr.checkpoint.causes import check_path, cut_short, explained


class ArrowSink:
    """A stream to the store."""

    def __init__(self, stream: pyarrow.NativeFile, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, data: memoryview) -> None:
        """See `Sink.write`."""
        with explained("writing", self._name):
            self._stream.write(data)


class ArrowStorage:
    """A prefix of an object store, or a folder of a distributed file system.

    Args:
        uri: as pyarrow reads it: `s3://bucket/prefix?region=..`, `gs://..`, `hdfs://..`, `abfs://..`.
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri.split("?", maxsplit=1)[0].rstrip("/")
        self._system, root = pyarrow.fs.FileSystem.from_uri(uri)
        self._root = root.rstrip("/")

    @contextmanager
    def create(self, path: str) -> Iterator[ArrowSink]:
        """See `Storage.create`."""
        name = self._name(path)
        with explained("writing", name):
            stream = self._system.open_output_stream(self._locate(path))
        yield ArrowSink(stream, name)
        with explained("writing", name):
            stream.close()

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        """See `Storage.read_into`."""
        name = self._name(path)
        with explained("reading", name), self._system.open_input_file(self._locate(path)) as file:
            if file.size() < offset + buffer.nbytes:
                raise cut_short(name, offset + buffer.nbytes, file.size())
            file.seek(offset)
            file.readinto(buffer)

    def size(self, path: str) -> int:
        """See `Storage.size`."""
        with explained("reading", self._name(path)):
            info = self._system.get_file_info(self._locate(path))
            if info.type != pyarrow.fs.FileType.File:
                raise FileNotFoundError
            return int(info.size)

    def list(self, folder: str = "") -> Iterator[str]:
        """See `Storage.list`."""
        with explained("listing", self._name(folder)):
            where = pyarrow.fs.FileSelector(self._locate(folder), allow_not_found=True)
            entries = self._system.get_file_info(where)
        yield from sorted(entry.base_name for entry in entries)

    def delete(self, path: str) -> None:
        """See `Storage.delete`."""
        where = self._locate(path)
        with explained("deleting", self._name(path)):
            kind = self._system.get_file_info(where).type
            if kind == pyarrow.fs.FileType.Directory:
                self._system.delete_dir(where)
            elif kind == pyarrow.fs.FileType.File:
                self._system.delete_file(where)

    def alone(self) -> AbstractContextManager[bool]:
        """See `Storage.alone`."""
        return nullcontext(False)

    def _locate(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}".rstrip("/")

    def _name(self, path: str) -> str:
        return f"{self.uri}/{path}".rstrip("/")
