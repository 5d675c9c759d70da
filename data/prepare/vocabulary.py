"""The pass of `--ids vocabulary`: counts every value of every category, and gives dense ids to frequent ones.

Id 0 is missing, 1 is rare, and the others follow by count descending and value ascending. Memory is bounded
for any size of the input, because only one piece is in memory at a time. Each piece writes its distinct
values with their counts, sorted by value (a run), and runs are merged `FAN_IN` at a time through small
windows until one is left for each category. As runs are sorted by value, counting along the way gives a
value's rank among those of equal count, without a second sort. Runs take about 12 bytes of disk per distinct
value of a piece.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Final

import numpy as np
import numpy.typing as npt
import polars as pl

from data.criteo import CATEGORY_NAMES
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.prepare.parse.walk import SpanTask
from data.prepare.pieces import Report, Written, record_path
from data.schema.ids import FIRST_VOCABULARY_ID

FAN_IN: Final = 32
"""Runs merged at once."""
WINDOW_ENTRIES: Final = 1 << 15
"""Entries of a run that are in memory while it is merged."""

_ENTRY: Final = np.dtype([("value", "<u4"), ("count", "<u8")])
_Entries = npt.NDArray[np.void]


class CountSpan(SpanTask):
    """Task that writes one run per category for each unfinished piece of a span."""

    def write(self, name: str, frames: Iterator[pl.DataFrame]) -> Written:
        """Count the values of a piece."""
        # a piece in which no line starts has no frame
        columns = {category: [np.empty(0, np.uint32)] for category in CATEGORY_NAMES}
        for frame in frames:
            for category, column in columns.items():
                column.append(frame[category].drop_nulls().to_numpy())
        num_bytes = 0
        for category, column in columns.items():
            values, counts = np.unique(np.concatenate(column), return_counts=True)
            with durable_file(run_path(self.records, name, category)) as sink:
                sink.write(_entries(values, counts).tobytes())
            num_bytes += sink.num_bytes
        return Written(num_bytes=num_bytes)


@dataclass(frozen=True, kw_only=True)
class RankCategory:
    """Task that merges the runs of one category and writes its vocabulary."""

    name: str
    """The category."""
    runs: tuple[Location, ...]
    """Its runs, one a piece."""
    scratch: Location
    """Folder for merged runs, which is removed at the end of the job."""
    path: Location
    """The vocabulary: an npy file, uint32 `[2, n]`: values ascending, and the id of each."""
    min_count: int
    """Values that occur less often are rare."""
    cap: int
    """Ids are below this; values that would get higher ones are rare."""

    def run(self, report: Report) -> None:
        """Merge and rank, unless the vocabulary exists."""
        if self.path.size() is not None:
            return
        runs, merged = list(self.runs), 0
        while len(runs) > 1:
            group, runs = runs[:FAN_IN], runs[FAN_IN:]
            target = run_path(self.scratch, f"merged-{merged:06d}", self.name)
            with durable_file(target) as sink:
                for entries in _merge(group):
                    sink.write(entries.tobytes())
            runs.append(target)
            merged += 1
        self._rank(runs[0])

    def _rank(self, run: Location) -> None:
        per_count: Counter[int] = Counter()
        for entries in self._frequent(run):
            counts, num = np.unique(entries["count"], return_counts=True)
            per_count.update(dict(zip(counts.tolist(), num.tolist(), strict=True)))
        descending = np.array(sorted(per_count, reverse=True), dtype=np.uint64)
        sizes = np.array([per_count[count] for count in descending.tolist()], dtype=np.int64)
        next_id = FIRST_VOCABULARY_ID + np.concatenate([[0], np.cumsum(sizes)])[:-1].astype(np.int64)
        size = min(int(sizes.sum()), self.cap - FIRST_VOCABULARY_ID)
        kept = self._kept(run, descending, next_id)
        # The file has two rows: ids wait in a second file, which is appended after all values.
        with durable_file(self.path) as sink, TemporaryFile(dir=self.scratch.local) as ids_file:
            header = {"descr": "<u4", "fortran_order": False, "shape": (2, size)}
            np.lib.format.write_array_header_1_0(sink, header)
            for values, ids in kept:
                sink.write(values.tobytes())
                ids_file.write(ids.tobytes())
            ids_file.seek(0)
            while chunk := ids_file.read(1 << 20):
                sink.write(chunk)

    def _kept(
        self, run: Location, descending: npt.NDArray[np.uint64], next_id: npt.NDArray[np.int64]
    ) -> Iterator[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]]:
        """Values and ids by value; `next_id` of a count moves on with every value of that count."""
        ascending = descending[::-1]
        for entries in self._frequent(run):
            group = len(descending) - 1 - np.searchsorted(ascending, entries["count"])
            order = np.argsort(group, kind="stable")
            groups, starts, sizes = np.unique(group[order], return_index=True, return_counts=True)
            ids = np.empty(len(entries), np.int64)
            within = np.arange(len(entries)) - np.repeat(starts, sizes)
            ids[order] = np.repeat(next_id[groups], sizes) + within
            next_id[groups] += sizes
            keep = ids < self.cap
            yield entries["value"][keep].astype("<u4"), ids[keep].astype("<u4")

    def _frequent(self, run: Location) -> Iterator[_Entries]:
        for entries in _windows(run):
            yield entries[entries["count"] >= self.min_count]


def run_path(records: Location, piece_name: str, category: str) -> Location:
    """Location of a piece's run of a category."""
    return record_path(records, piece_name, f".{category}.run")


def vocabulary_size(file: Location) -> int:
    """Rows that a table needs for a vocabulary file's ids."""
    with file.open() as stream:
        np.lib.format.read_magic(stream)
        shape, _, _ = np.lib.format.read_array_header_1_0(stream)
    return int(shape[1]) + FIRST_VOCABULARY_ID


def _entries(values: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]) -> _Entries:
    entries = np.empty(len(values), _ENTRY)
    entries["value"], entries["count"] = values, counts
    return entries


def _windows(run: Location) -> Iterator[_Entries]:
    with run.open() as stream:
        while chunk := stream.read(WINDOW_ENTRIES * _ENTRY.itemsize):
            yield np.frombuffer(chunk, _ENTRY)


def _merge(runs: Sequence[Location]) -> Iterator[_Entries]:
    """Merge runs: values ascending, each once, counts added.

    All values up to the smallest of the windows' last ones are complete in memory: take them, and
    refill the windows that are used up.
    """
    streams = [_windows(run) for run in runs]
    windows = [next(stream, None) for stream in streams]
    while any(window is not None for window in windows):
        horizon = min(int(window["value"][-1]) for window in windows if window is not None)
        taken = []
        for position, window in enumerate(windows):
            if window is None:
                continue
            cut = int(np.searchsorted(window["value"], horizon, side="right"))
            taken.append(window[:cut])
            windows[position] = window[cut:] if cut < len(window) else next(streams[position], None)
        merged = np.concatenate(taken)
        values, inverse = np.unique(merged["value"], return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, inverse, merged["count"].astype(np.int64))
        yield _entries(values, counts)
