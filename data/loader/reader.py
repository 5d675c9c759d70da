"""Reads checked rows by their numbers in the data set, and decodes each row group once per run of rows."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from data.dataset import DatasetManifest
from data.loader.columns import Rows
from data.loader.decode import decode
from data.loader.row_set import RowNumbers
from data.loader.source import ReadsAhead, RowGroupSource

ANNOUNCED: Final = 2
"""Row groups after the current one that are announced to the source: one being fetched and one more."""


class RowReader:
    """Reads rows by their numbers in the data set.

    The last row group stays decoded, because the next run of rows usually starts in it. If the runs of two
    ranks share a row group, both ranks decode it.

    Args:
        uri: the data set's folder, for messages.
        manifest: the data set; row numbers count through its parts in order.
        source: of the row groups.
    """

    def __init__(self, uri: str, manifest: DatasetManifest, source: RowGroupSource) -> None:
        self._uri, self._manifest, self._source = uri, manifest, source
        self._groups = [(part, index) for part in manifest.parts for index in range(len(part.row_groups))]
        sizes = [part.row_groups[index] for part, index in self._groups]
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
        self._kept: tuple[int, Rows] | None = None

    def pieces(self, rows: RowNumbers, following: RowNumbers) -> Iterator[Rows]:
        """Yield the rows with these numbers in order, one piece per row group.

        Args:
            rows: ascending row numbers.
            following: row numbers that will be read next, to announce them to the source.
        """
        runs = self._runs(rows)
        groups = [group for group, _, _ in [*runs, *self._runs(following)]]
        for number, (group, begin, end) in enumerate(runs):
            self._announce(groups[number : number + 1 + ANNOUNCED])
            yield self._decoded(group).pick(rows[begin:end] - self._starts[group])

    def _runs(self, rows: RowNumbers) -> list[tuple[int, int, int]]:
        """Row groups of `rows` in order, each with the begin and end of its positions in `rows`."""
        runs, done = [], 0
        while done < len(rows):
            group = int(np.searchsorted(self._starts, rows[done], side="right")) - 1
            end = int(np.searchsorted(rows, self._starts[group + 1]))
            runs.append((group, done, end))
            done = end
        return runs

    def _announce(self, groups: list[int]) -> None:
        """Announce row groups, except the decoded one, to a source that reads ahead."""
        if not isinstance(self._source, ReadsAhead):
            return
        before = self._kept[0] if self._kept else None
        for group in groups:
            if group != before:
                self._source.expect(*self._groups[group])
            before = group

    def _decoded(self, group: int) -> Rows:
        if self._kept is None or self._kept[0] != group:
            self._kept = None  # frees its memory before the next one is decoded
            part, index = self._groups[group]
            table = self._source.read(part, index)
            self._kept = group, decode(table, self._manifest, f"{self._uri}/{part.path}")
        return self._kept[1]
