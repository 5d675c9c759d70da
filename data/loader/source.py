"""Where decoded row groups come from: a contract of one method, and Parquet on any filesystem.

A `RowGroupSource` gives one row group of one part as an Arrow table with the columns of
`column_names`. `ParquetSource` decodes it from the file; `data.cache` wraps any source.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final, Protocol, runtime_checkable

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from data.criteo import LABEL
from data.dataset import DatasetManifest, Part, open_folder
from data.loader.decode import PREPARE_AGAIN

OPEN_FILES: Final = 4
"""A rank reads in time order, so it needs one file at a time, and two where its windows jump."""


class RowGroupSource(Protocol):
    """Gives decoded row groups. Loaders may share a source, so it is called from several threads."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `read` gives, in order."""
        ...

    def read(self, part: Part, row_group: int) -> pa.Table:
        """All needed columns of one row group.

        Args:
            part: a file of the data set's manifest.
            row_group: its number in the file.

        Raises:
            OSError: the file is missing, damaged or cannot be reached; the message names it.
            ValueError: the file has other columns or types than the manifest says.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A source that also wants to know what comes next, because it can fetch that meanwhile."""

    def expect(self, part: Part, row_group: int) -> None:
        """Told what will be read soon, in that order, the row group that is read next included.

        Never waits for storage and never raises: what goes wrong is raised when the row group is read.
        """
        ...


def column_names(manifest: DatasetManifest) -> tuple[str, ...]:
    """The Parquet columns that training needs: label, dense, categories."""
    return (LABEL, *manifest.dense, *(feature.name for feature in manifest.features))


class ParquetSource:
    """Decodes row groups from the Parquet files of a data set, with one thread.

    Args:
        uri: the data set's folder, a local path or any pyarrow filesystem URI.
        manifest: the data set's manifest.
        filesystem: reads `uri` as a path on this filesystem instead.
    """

    def __init__(
        self, uri: str, manifest: DatasetManifest, *, filesystem: fs.FileSystem | None = None
    ) -> None:
        self._filesystem, self._folder = (filesystem, uri) if filesystem else open_folder(uri)
        self.columns = column_names(manifest)
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, part: Part, row_group: int) -> pa.Table:
        """One row group, as `RowGroupSource.read` says."""
        with self._lock:
            return self._read(part, row_group)

    def check_files(self, parts: Sequence[Part]) -> None:
        """See that all these files are there, each of its size, by a look into their folders: none is opened.

        Raises:
            OSError: one is missing or has another size, or a folder cannot be looked into; names it.
        """
        for folder, inside in groupby(parts, key=lambda part: part.path.rpartition("/")[0]):
            selector = fs.FileSelector(f"{self._folder}/{folder}", allow_not_found=True)
            found = {info.base_name: info for info in self._filesystem.get_file_info(selector)}
            for part in inside:
                path = f"{self._folder}/{part.path}"
                info = found.get(part.path.rpartition("/")[2])
                if info is None or info.type == fs.FileType.NotFound:
                    raise _missing(path)
                if info.type == fs.FileType.File and info.size != part.num_bytes:
                    raise OSError(
                        f"{path} has {info.size} bytes instead of {part.num_bytes}: copy it again or "
                        f"{PREPARE_AGAIN}"
                    )

    def close(self) -> None:
        """Let go of the open files; a read in another thread finishes undisturbed."""
        self._files.clear()

    def _read(self, part: Part, row_group: int) -> pa.Table:
        path = f"{self._folder}/{part.path}"
        with _named_errors(path, row_group):
            file = self._open(path, part)
        missing = sorted(set(self.columns) - set(file.schema_arrow.names))
        if missing:
            raise ValueError(f"{path} lacks the columns {missing} that its manifest names; {PREPARE_AGAIN}")
        with _named_errors(path, row_group):
            table = file.read_row_group(row_group, columns=list(self.columns), use_threads=False)
            if table.num_rows != part.row_groups[row_group]:
                raise OSError(f"{table.num_rows} rows instead of {part.row_groups[row_group]}")
        return table.select(list(self.columns))

    def _open(self, path: str, part: Part) -> pq.ParquetFile:
        if path in self._files:
            self._files.move_to_end(path)
            return self._files[path]
        handle = self._filesystem.open_input_file(path)
        if handle.size() != part.num_bytes:
            raise OSError(f"{handle.size()} bytes instead of {part.num_bytes}")
        # Checksums are checked where the writer stored them: a flipped bit in plain int32 data still decodes.
        # Buffering fetches the columns of a row group in one request, which is what counts on remote storage.
        file = pq.ParquetFile(handle, page_checksum_verification=True, pre_buffer=True)
        if file.num_row_groups != len(part.row_groups):
            raise OSError(f"{file.num_row_groups} row groups instead of {len(part.row_groups)}")
        self._files[path] = file
        if len(self._files) > OPEN_FILES:
            self._files.popitem(last=False)
        return file


@contextmanager
def _named_errors(path: str, row_group: int) -> Iterator[None]:
    """Put the file's name into whatever pyarrow raises while reading it."""
    try:
        yield
    except FileNotFoundError as error:
        raise _missing(path) from error
    except (OSError, pa.ArrowException, UnicodeError, MemoryError) as error:
        raise OSError(
            f"cannot read row group {row_group} of {path}: {error}. If the storage can be reached, the file "
            "is damaged: copy it again (`python -m data.prepare --verify` names the damaged files) or "
            f"{PREPARE_AGAIN}"
        ) from error


def _missing(path: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{path} is in the data set's manifest but not in its folder; copy it there or {PREPARE_AGAIN}"
    )
