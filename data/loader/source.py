"""Sources of decoded row groups: a protocol with one method, and Parquet files on any filesystem.

A `RowGroupSource` gives one row group of one part as an Arrow table with the columns of the manifest.
`ParquetSource` decodes Parquet files, and `data.cache` wraps any source.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Final, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from data.dataset import DatasetManifest, Part, open_folder
from data.loader.decode import PREPARE_AGAIN

OPEN_FILES: Final = 4
"""Maximum of open files; a rank reads in time order and needs one at a time, or two between windows."""


class RowGroupSource(Protocol):
    """Gives decoded row groups; thread-safe, since loaders may share a source."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the tables that `read` returns, in order."""
        ...

    def read(self, part: Part, row_group: int) -> pa.Table:
        """Read all needed columns of one row group.

        Args:
            part: a file of the data set's manifest.
            row_group: its number in the file.

        Raises:
            OSError: the file is missing, damaged or cannot be reached; the message names it.
            ValueError: columns or types of the file differ from the manifest.
        """
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A source that can fetch announced row groups in the background."""

    def expect(self, part: Part, row_group: int) -> None:
        """Announce a row group that will be read soon; called in reading order, including the next one.

        The call never waits for storage and never raises; errors are raised when the row group is read.
        """
        ...


class ParquetSource:
    """Decodes row groups from the Parquet files of a data set, with one thread.

    Args:
        uri: the data set's folder, a local path or any pyarrow filesystem URI.
        manifest: the data set's manifest.
        filesystem: reads `uri` as a path on this filesystem instead.
        columns: columns to read instead of those of the manifest.
    """

    def __init__(
        self,
        uri: str,
        manifest: DatasetManifest,
        *,
        filesystem: fs.FileSystem | None = None,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._filesystem, self._folder = (filesystem, uri) if filesystem else open_folder(uri)
        self.columns = manifest.columns if columns is None else tuple(columns)
        self._files: OrderedDict[str, pq.ParquetFile] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, part: Part, row_group: int) -> pa.Table:
        """Read one row group; see `RowGroupSource.read`."""
        with self._lock:
            return self._read(part, row_group)

    def check_files(self, parts: Sequence[Part]) -> None:
        """Check that all files exist with their sizes, by listing their folders without opening any.

        Raises:
            OSError: a file is missing or has another size, or a folder cannot be listed.
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
        """Close the open files; a read in another thread still finishes."""
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
        # Checksums, where the writer stored them: a flipped bit in plain int32 data would still decode.
        # Buffering fetches all columns of a row group in one request, which matters on remote storage.
        file = pq.ParquetFile(handle, page_checksum_verification=True, pre_buffer=True)
        if file.num_row_groups != len(part.row_groups):
            raise OSError(f"{file.num_row_groups} row groups instead of {len(part.row_groups)}")
        self._files[path] = file
        if len(self._files) > OPEN_FILES:
            self._files.popitem(last=False)
        return file


def columns_of_files(uri: str, manifest: DatasetManifest) -> list[str]:
    """Columns of the first file of a data set.

    Raises:
        OSError: the file cannot be read.
    """
    filesystem, folder = open_folder(uri)
    with filesystem.open_input_file(f"{folder}/{manifest.parts[0].path}") as file:
        return list(pq.read_schema(file).names)


def check_labels(uri: str, manifest: DatasetManifest) -> None:
    """Refuse data without labels; a file that cannot be read is left to its readers, who name it.

    Raises:
        ValueError: the files lack the label column.
    """
    try:
        has_labels = not manifest.parts or manifest.label in columns_of_files(uri, manifest)
    except (OSError, pa.ArrowException):
        return
    if not has_labels:
        raise ValueError(
            f"{uri} has no labels: its files lack the column {manifest.label!r}. Such data is for "
            "`python -m dlrm.predict`, not for training or evaluation"
        )


class WithoutLabels:
    """Row groups of data without labels, as a `RowGroupSource`: all labels are 0."""

    def __init__(self, uri: str, manifest: DatasetManifest) -> None:
        self.columns = manifest.columns
        self._label = manifest.label
        self._source = ParquetSource(uri, manifest, columns=[c for c in self.columns if c != self._label])

    def read(self, part: Part, row_group: int) -> pa.Table:
        """Read one row group; see `RowGroupSource.read`."""
        table = self._source.read(part, row_group)
        labels = pa.array(np.zeros(table.num_rows, np.int8))
        return table.add_column(self.columns.index(self._label), self._label, labels)

    def close(self) -> None:
        """Close the open files."""
        self._source.close()


@contextmanager
def _named_errors(path: str, row_group: int) -> Iterator[None]:
    """Add the file's name to errors of pyarrow."""
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
