"""Vocabularies: counts the values of a feature, and numbers the frequent ones.

Every run of the reading pass has a file with the distinct values of each feature and their counts, sorted by
value. They are merged `FAN_IN` at a time through small windows, so that only the vocabulary itself must fit
in memory. Ids follow by count descending and value ascending, whatever the runs are.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from data.jobs.files import durable_file
from data.jobs.location import Location
from data.schema.ids import FIRST_VOCABULARY_ID

FAN_IN: Final = 32
"""Files merged at once."""
WINDOW_ROWS: Final = 1 << 14
"""Values of a file that are in memory while it is merged."""


def write_counts(values: pl.Series, path: Location) -> int:
    """Write the distinct values, sorted, with their counts; returns the bytes of the file."""
    frame = pl.DataFrame({"value": values.drop_nulls()}).group_by("value").len("count").sort("value")
    with durable_file(path) as sink:
        frame.write_parquet(sink, compression="lz4", statistics=False, row_group_size=WINDOW_ROWS)  # type: ignore[arg-type]
    return sink.num_bytes


@dataclass(frozen=True, kw_only=True)
class RankFeature:
    """Task that makes the vocabulary of one feature."""

    name: str
    """The feature."""
    runs: tuple[Location, ...]
    """Its files of counts."""
    scratch: Location
    """Folder for merged files."""
    path: Location
    """The vocabulary: a Parquet file with `value` and `id` (int32), in order of id."""
    min_count: int
    """Rarer values are left out."""
    max_rows: int
    """Rows of the table at most."""

    def run(self, report: Callable[[Any], object]) -> None:
        """Merge and rank, unless the vocabulary exists."""
        if self.path.size() is not None:
            return
        runs, merged = list(self.runs), 0
        while len(runs) > FAN_IN:
            group, runs = runs[:FAN_IN], runs[FAN_IN:]
            target = self.scratch / f"merged-{merged:06d}.{self.name}.counts"
            write_frames(merge(group), target)
            runs.append(target)
            merged += 1
        values = self._kept(runs)
        ids = pl.Series("id", range(FIRST_VOCABULARY_ID, FIRST_VOCABULARY_ID + len(values)), pl.Int32)
        write_frames(iter([pl.DataFrame([values, ids])]), self.path)

    def _kept(self, runs: Sequence[Location]) -> pl.Series:
        sizes: Counter[int] = Counter()
        for frame in merge(runs):
            sizes.update(dict(frame["count"].value_counts(name="values").iter_rows()))
        room, rarest, spare = self.max_rows - FIRST_VOCABULARY_ID, self.min_count, 0
        for count in sorted((count for count in sizes if count >= self.min_count), reverse=True):
            rarest, spare = count, room
            room -= sizes[count]
            if room < 0:
                break
        frames = []
        for frame in merge(runs):
            tied = frame.filter(pl.col("count") == rarest).head(max(spare, 0))
            spare -= tied.height
            frames += [frame.filter(pl.col("count") > rarest), tied]
        return pl.concat(frames).sort(["count", "value"], descending=[True, False])["value"]


def merge(runs: Sequence[Location]) -> Iterator[pl.DataFrame]:
    """Merge files of counts: values ascending, each once, counts added.

    All values up to the smallest of the windows' last ones are complete in memory: take them, and refill the
    windows that are used up.
    """
    streams = [_windows(run) for run in runs]
    windows = [next(stream) for stream in streams]
    yield windows[0].clear()
    while any(window.height for window in windows):
        horizon = min(window["value"][-1] for window in windows if window.height)
        taken = []
        for position, window in enumerate(windows):
            cut = int(window["value"].search_sorted(horizon, side="right")) if window.height else 0
            taken.append(window[:cut])
            rest = window[cut:]
            windows[position] = rest if rest.height else next(streams[position], rest)
        yield pl.concat(taken).group_by("value").agg(pl.col("count").sum()).sort("value")


def write_frames(frames: Iterator[pl.DataFrame], path: Location) -> None:
    """Write frames of equal columns to one Parquet file, a row group each."""
    first = next(frames).to_arrow()
    with durable_file(path) as sink, pq.ParquetWriter(sink, first.schema, compression="lz4") as writer:
        writer.write_table(first)
        for frame in frames:
            writer.write_table(frame.to_arrow())


def _windows(run: Location) -> Iterator[pl.DataFrame]:
    """Parts of a file of counts; one that may be empty at least."""
    with run.open() as stream:
        file = pq.ParquetFile(stream, pre_buffer=False)
        if not file.metadata.num_rows:
            yield _frame(file.schema_arrow.empty_table())
        for batch in file.iter_batches(WINDOW_ROWS, use_threads=False):
            yield _frame(pa.Table.from_batches([batch]))


def _frame(table: pa.Table) -> pl.DataFrame:
    frame = pl.from_arrow(table)
    assert isinstance(frame, pl.DataFrame)
    return frame
