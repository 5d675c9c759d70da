"""The writing pass: merges the sorted runs, encodes the rows, and writes the data set's Parquet files."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import islice, pairwise
from typing import Final

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data.convert.order import Sorted
from data.dataset import Part
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.schema import Encoder, Schema
from data.schema.encoder import read_vocabulary, value_dtype
from data.schema.rows import DAY, TIME

GROUP_ROWS: Final = 65_536
"""Rows of a row group, at most."""
GROUPS_PER_FILE: Final = 16
COMPRESSION: Final = "lz4"
_ENCODED_SLICES: Final = 16
"""Slices of runs that are encoded at once: one takes the time of many, and texts more memory than ids."""
_MOST_OPEN: Final = 64
_GROUP_BYTES: Final = 16 << 20
_LEAST_GROUP_ROWS: Final = 1024


def group_rows(schema: Schema, num_rows: int, num_values: int) -> int:
    """Rows of a row group: fewer where long lists make the mean row wide."""
    columns = 1 + len(schema.dense) + 2 * len(schema.sparse)
    row_bytes = 4 * columns + 8 * num_values / max(num_rows, 1)
    rows = GROUP_ROWS
    while rows > _LEAST_GROUP_ROWS and rows * row_bytes > _GROUP_BYTES:
        rows //= 2
    return rows


@dataclass(frozen=True, kw_only=True)
class Slices:
    """The rows of one day in the runs."""

    runs: tuple[str, ...]
    """Names of the runs."""
    starts: tuple[int, ...]
    """First row of the day in each run."""
    stops: tuple[int, ...]
    """The row after its last one."""


@dataclass(frozen=True, kw_only=True)
class WritePart:
    """Task that writes one Parquet file."""

    out: Location
    """Folder of the data set."""
    state: Location
    """Folder of the job's state, with the finished schema."""
    day: int
    """Day of the file."""
    index: int
    """Its position in the day."""
    rows: range
    """Ranks of its rows in the day."""
    group_rows: int
    """Rows of a row group."""
    slices: Slices
    """The day."""
    job: str
    """Random; in another job, files of these names may hold something else."""

    @property
    def path(self) -> str:
        """Path of the file in the data set's folder."""
        return f"day={self.day}/part-{self.index:05d}.parquet"

    @property
    def record_path(self) -> Location:
        """Where the file's entry in the manifest waits for the end of the job."""
        return self.state / "parts" / f"day={self.day}-part-{self.index:05d}.json"

    def finished(self) -> Part | None:
        """The manifest's entry, if the file is written."""
        try:
            raw = json.loads(self.record_path.read())
            if (self.out / self.path).size() != raw["num_bytes"]:
                return None
        except FileNotFoundError:
            return None
        return Part(**{**raw, "row_groups": tuple(raw["row_groups"])})

    def run(self, report: Callable[[tuple[int, int]], object]) -> None:
        """Merge, encode and write; reports rows, twice."""
        encoder = open_encoder(self.out.root, self.state, self.job)
        schema = arrow_schema(encoder)
        folder, slices = self.state / "runs", self.slices
        timed = encoder.schema.time is not None
        whole = open_runs(folder, slices.runs, slices.stops, self.job, timed=timed)
        day = whole.slices(np.array(slices.starts, np.int64), np.array(slices.stops, np.int64))
        bounds = [*range(self.rows.start, self.rows.stop, self.group_rows), self.rows.stop]
        cuts = day.cuts(bounds) + np.array(slices.starts, np.int64)
        with (
            ExitStack() as files,
            durable_file(self.out / self.path) as sink,
            pq.ParquetWriter(
                sink, schema, compression=COMPRESSION, write_statistics=False, write_page_checksum=True
            ) as writer,
        ):
            runs = _Runs(folder, slices.runs, files)
            for start, stop in pairwise(cuts):
                frames = [encoder.encode_read(rows) for rows in _joined(runs.rows(start, stop))]
                self._write(writer, schema, frames)
                num_rows = int((stop - cuts[0]).sum())
                report((num_rows, num_rows))
        sizes = tuple(int(size) for size in np.diff(bounds))
        part = Part(
            path=self.path,
            day=self.day,
            num_rows=len(self.rows),
            row_groups=sizes,
            num_bytes=sink.num_bytes,
            sha256=sink.sha256,
        )
        with durable_file(self.record_path) as record:
            record.write(json.dumps(asdict(part)).encode())

    def _write(self, writer: pq.ParquetWriter, schema: pa.Schema, frames: list[pl.DataFrame]) -> None:
        group = pl.concat(frames)
        if TIME in group.columns:
            group = group.sort(TIME, maintain_order=True)
        table = group.select(schema.names).to_arrow().cast(schema)
        writer.write_table(table, row_group_size=self.group_rows)


def arrow_schema(encoder: Encoder) -> pa.Schema:
    """Columns of the data set's files: without nulls, lists with 32-bit offsets."""
    fields = [(encoder.schema.label.name, pa.uint8())] if encoder.schema.has_labels else []
    fields += [(dense.name, pa.float32()) for dense in encoder.schema.dense]
    for sparse in encoder.schema.sparse:
        kind = pa.int64() if sparse.ids == "raw" else pa.int32()
        fields.append((sparse.name, pa.list_(kind) if sparse.is_list else kind))
    weights = [feature.weights for feature in encoder.features if feature.weights]
    fields += [(name, pa.list_(pa.float32())) for name in weights]
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in fields])


@lru_cache(maxsize=1)
def open_encoder(out: str, state: Location, _job: str) -> Encoder:
    """The encoder of a job whose vocabularies and means are known; one for all tasks of a worker."""
    schema = Schema.from_json(json.loads((state / "schema.json").read()))
    wanted = [sparse for sparse in schema.sparse if sparse.ids == "vocabulary"]
    return Encoder(schema, {one.name: read_vocabulary(out, one).cast(value_dtype(one)) for one in wanted})


def open_runs(
    folder: Location, names: Sequence[str], sizes: Sequence[int], job: str, *, timed: bool
) -> Sorted:
    """The runs' times, mapped and not read."""
    times = [_times(folder / f"{name}.times", job) for name in names] if timed else None
    return Sorted(times, np.array(sizes, np.int64))


@lru_cache(maxsize=256)  # a file of a store is copied to the local disk
def _times(file: Location, _job: str) -> NDArray[np.int64]:
    with file.on_disk() as path:
        return np.memmap(path, "<i8", "r")


class _Runs:
    """The files of runs, of which a few are open; `files` closes them."""

    def __init__(self, folder: Location, names: Sequence[str], files: ExitStack) -> None:
        self._folder, self._names, self._files = folder, names, files
        self._opened: dict[int, pq.ParquetFile] = {}

    def rows(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Iterator[pl.DataFrame]:
        """Rows `starts` to `stops` of each run, in slices."""
        for run in np.flatnonzero(stops > starts).tolist():
            if run not in self._opened:
                if len(self._opened) >= _MOST_OPEN:
                    self._opened.clear()
                    self._files.pop_all().close()
                stream = self._files.enter_context((self._folder / f"{self._names[run]}.rows").open())
                self._opened[run] = pq.ParquetFile(stream, pre_buffer=False)
            yield from _read_slice(self._opened[run], int(starts[run]), int(stops[run]))


def _joined(slices: Iterator[pl.DataFrame]) -> Iterator[pl.DataFrame]:
    while some := list(islice(slices, _ENCODED_SLICES)):
        yield pl.concat(some)


def _read_slice(file: pq.ParquetFile, start: int, stop: int) -> Iterator[pl.DataFrame]:
    """Rows `start` to `stop` of a run, which are in row groups of one size but for the last."""
    size = file.metadata.row_group(0).num_rows
    for group in range(start // size, -(-stop // size)):
        frame = pl.from_arrow(file.read_row_group(group, use_threads=False))
        assert isinstance(frame, pl.DataFrame)
        first = max(start - group * size, 0)
        yield frame[first : stop - group * size].drop(DAY, strict=False)
