"""From row numbers of the data set to checked rows, decoding each row group once a run."""

from collections.abc import Iterator

import numpy as np

from data.dataset import DatasetManifest
from data.loader.columns import Rows
from data.loader.decode import decode
from data.loader.order import RowNumbers
from data.loader.source import RowGroupSource


class RowReader:
    """Reads rows by their numbers in the data set.

    The row group read last is kept decoded, because the next run of rows usually begins in it. Two
    ranks whose runs meet inside a row group both decode it.

    Args:
        uri: the data set's folder, for messages.
        manifest: the data set; row numbers count through its parts in order.
        source: gives the row groups.
    """

    def __init__(self, uri: str, manifest: DatasetManifest, source: RowGroupSource) -> None:
        self._uri, self._manifest, self._source = uri, manifest, source
        self._groups = [(part, index) for part in manifest.parts for index in range(len(part.row_groups))]
        sizes = [part.row_groups[index] for part, index in self._groups]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._kept: tuple[int, Rows] | None = None

    def pieces(self, rows: RowNumbers) -> Iterator[Rows]:
        """The rows of ascending numbers `rows`, in order, one piece a row group."""
        done = 0
        while done < len(rows):
            group = int(np.searchsorted(self._starts, rows[done], side="right")) - 1
            end = int(np.searchsorted(rows, self._starts[group + 1]))
            yield self._decoded(group).pick(rows[done:end] - self._starts[group])
            done = end

    def _decoded(self, group: int) -> Rows:
        if self._kept is None or self._kept[0] != group:
            self._kept = None  # frees its memory before the next one is decoded
            part, index = self._groups[group]
            table = self._source.read(part, index)
            self._kept = group, decode(table, self._manifest, f"{self._uri}/{part.path}")
        return self._kept[1]
