"""Files and folders on a local disk or on any store that pyarrow has a filesystem for."""

import io
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, Final

from pyarrow import fs

from data.dataset import open_folder, without_password

READ_BYTES: Final = 1 << 20
"""Bytes of a store that are requested at once at least."""

_OBJECT_STORES: Final = frozenset({"s3", "gcs", "abfs"})

_open = lru_cache(maxsize=64)(open_folder)  # opening may take requests to the store


@dataclass(frozen=True, order=True)
class Location:
    """A file or a folder that may exist or not. Picklable.

    Args:
        root: a local path, or any pyarrow filesystem URI (`s3://BUCKET/FOLDER?region=...`, `file:///...`).
        inner: path below the root, with forward slashes; empty: the root itself.
    """

    root: str
    inner: str = ""

    @classmethod
    def of(cls, place: "str | Path | Location") -> "Location":
        """The location of a path or URI."""
        if isinstance(place, Location):
            return place
        return cls(str(place) if "://" in str(place) else str(Path(place)))

    def absolute(self) -> "Location":
        """The same place, whatever the working folder."""
        return self if "://" in self.root else Location(str(Path(self.root).absolute()), self.inner)

    def __truediv__(self, name: str) -> "Location":
        return Location(self.root, f"{self.inner}/{name}" if self.inner else name)

    def __str__(self) -> str:
        """Path or URI for messages, without a password."""
        root = without_password(self.root)
        return f"{root.rstrip('/')}/{self.inner}" if self.inner else root

    @property
    def name(self) -> str:
        """Last part of the path."""
        return PurePosixPath(self.path).name

    @property
    def filesystem(self) -> fs.FileSystem:
        """Its filesystem.

        Raises:
            ValueError: no filesystem supports the URI.
            OSError: the store cannot be reached.
        """
        return _open(self.root)[0]

    @property
    def path(self) -> str:
        """Path on the filesystem."""
        root = _open(self.root)[1]
        return f"{root.rstrip('/')}/{self.inner}" if self.inner else root

    @property
    def local(self) -> Path | None:
        """Path on the local disk; None on a store."""
        return Path(self.path) if isinstance(self.filesystem, fs.LocalFileSystem) else None

    @property
    def is_object_store(self) -> bool:
        """Whether a file appears there only when it is whole, and is moved only by a copy."""
        return self.filesystem.type_name in _OBJECT_STORES

    def open(self) -> io.BufferedReader:
        """Open a file for reading, seekable; not mapped, not buffered whole."""
        if self.local is not None:
            return self.local.open("rb")
        stored: Any = self.filesystem.open_input_file(self.path)
        return io.BufferedReader(stored, READ_BYTES)

    def read(self) -> bytes:
        """Content of a file."""
        with self.open() as stream:
            return stream.read()

    @contextmanager
    def on_disk(self) -> Iterator[Path]:
        """A file on the local disk, to be mapped: itself, or a copy which is removed at the end."""
        if self.local is not None:
            yield self.local
            return
        with tempfile.NamedTemporaryFile() as copy, self.open() as stored:
            shutil.copyfileobj(stored, copy)
            copy.flush()
            yield Path(copy.name)

    def size(self) -> int | None:
        """Bytes of a file; None if there is none."""
        info = self.filesystem.get_file_info(self.path)
        return int(info.size) if info.is_file else None

    def names(self) -> list[str]:
        """Names in a folder, sorted; none if the folder does not exist."""
        selector = fs.FileSelector(self.path, allow_not_found=True)
        return sorted(info.base_name for info in self.filesystem.get_file_info(selector))

    def sizes(self) -> dict[str, int]:
        """Sizes of all files below a folder, by their path in it, sorted."""
        selector = fs.FileSelector(self.path, allow_not_found=True, recursive=True)
        files = [info for info in self.filesystem.get_file_info(selector) if info.is_file]
        start = len(self.path.rstrip("/")) + 1
        return {info.path[start:]: info.size for info in sorted(files, key=lambda info: info.path)}

    def delete(self) -> None:
        """Delete a file."""
        self.filesystem.delete_file(self.path)

    def delete_folder(self) -> None:
        """Delete a folder and all in it, if it exists."""
        if self.filesystem.get_file_info(self.path).type == fs.FileType.Directory:
            self.filesystem.delete_dir(self.path)
