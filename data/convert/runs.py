"""The reading pass: a file becomes runs, typed rows sorted by day and time, in scratch files.

A run is what fits in a worker's memory, so that runs differ with `--memory`; what is made of them does not.
It is committed by its record, a small JSON file, after its rows, times, counts and bad rows.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import polars as pl

from data.convert.counts import write_counts
from data.convert.moments import Moments
from data.convert.read.blocks import BadRow, Block
from data.convert.read.files import InputFile
from data.jobs.files import durable_file
from data.jobs.location import Location
from data.schema import Schema
from data.schema.lists import Ragged
from data.schema.rows import DAY, TIME, read_rows

SLICE_BYTES: Final = 128 << 10
"""Memory of the rows that are read at least of a run, when a file of the data set takes rows of all runs."""
_MOST_SLICES: Final = 128
"""Of a run: a larger one has larger slices, as each column of each slice takes its time to write."""
_MAX_SLICE_ROWS: Final = 8192
RUN_ROWS: Final = 1 << 22
"""Rows of a run at most."""
_TEXT_LENGTH: Final = 4096


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Record of a finished run."""

    name: str
    """Name of its files; sorted names are in the order of the input."""
    file: str
    """The input file."""
    start: int
    """Records of the file before it."""
    end: int
    """Records of the file up to its end."""
    last: bool
    """Whether the file ends with it."""
    num_rows: int
    """Good rows."""
    num_values: int
    """Ids and weights of all rows."""
    num_rejects: Mapping[str, int]
    """Bad rows by reason."""
    days: Mapping[int, int]
    """Rows by day, where a column says it."""
    moments: Mapping[str, tuple[int, int, int]]
    """Count, sum and sum of squares of columns that are to be standardized."""

    @classmethod
    def read(cls, path: Location) -> "RunRecord":
        """Read a record."""
        raw: dict[str, Any] = json.loads(path.read())
        raw["days"] = {int(day): count for day, count in raw["days"].items()}
        return cls(**raw)


@dataclass(frozen=True, kw_only=True)
class ReadFile:
    """Task that reads what is left of a file."""

    file: InputFile
    """The file."""
    position: int
    """Its position among the files."""
    finished: int
    """Records of it that are in finished runs."""
    schema: Schema
    """What to read."""
    folder: Location
    """Of the runs."""
    block_bytes: int
    """Raw bytes parsed at once; a run is four times that in memory."""

    def run(self, report: Callable[[tuple[int, int]], object]) -> None:
        """Read and commit runs; reports stored bytes and records that have been read."""
        maker, num_records = _Run(self, self.finished), 0
        blocks = self.file.blocks(self.schema.columns, self.finished, self.block_bytes)
        for block in blocks:
            if maker.is_full:
                maker.commit(last=False)
                maker = _Run(self, maker.end)
            maker.add(block)
            num_records += block.num_records
            report((block.stored_position, num_records))
        maker.commit(last=True)


class _Run:
    def __init__(self, task: ReadFile, start: int) -> None:
        self._task, self._start, self.end = task, start, start
        self._frames: list[pl.DataFrame] = []
        self._bad: list[BadRow] = []
        self._num_bytes = 0
        self._num_rows = 0

    @property
    def is_full(self) -> bool:
        """Whether the run has its size."""
        return self._num_bytes >= 4 * self._task.block_bytes or self._num_rows >= RUN_ROWS

    def add(self, block: Block) -> None:
        """Add the rows of a block."""
        try:
            rows = read_rows(block.frame, self._task.schema, to_train=True)
        except ValueError as error:
            raise ValueError(f"{self._task.file.path}: {error}") from error
        refused = block.frame[sorted(rows.reasons)] if rows.reasons else block.frame.clear()
        bad = [
            BadRow(int(block.rows[at]), rows.reasons[at], _shown(row))
            for at, row in zip(sorted(rows.reasons), refused.iter_rows(named=True), strict=True)
        ]
        self._bad += sorted([*block.bad, *bad], key=lambda one: one.row)
        self._num_bytes += sum(len(one.text) + 200 for one in [*block.bad, *bad])
        good = rows.good
        self._frames.append(good)
        self._num_bytes += int(good.estimated_size())
        self._num_rows += good.height
        last_bad = max((one.row for one in block.bad), default=0)
        self.end = max(int(block.rows[-1]) if len(block.rows) else 0, last_bad, self.end)

    def commit(self, *, last: bool) -> None:
        """Write the run's files, and its record last."""
        task = self._task
        name = run_name(task.position, self._start)
        frame = pl.concat(self._frames) if self._frames else pl.DataFrame()
        self._frames = []
        keys = [key for key in (DAY, TIME) if key in frame.columns]
        if keys:
            frame = frame.sort(keys, maintain_order=True)
        with durable_file(task.folder / f"{name}.rejects.jsonl") as rejects:
            for bad in self._bad:
                rejects.write(_reject_line(task.file.name, bad))
        if frame.height:
            self._write(frame, partial(_path, task.folder, name))
        record = RunRecord(
            name=name,
            file=task.file.name,
            start=self._start,
            end=self.end,
            last=last,
            num_rows=frame.height,
            num_values=_num_values(frame, task.schema),
            num_rejects=dict(Counter(bad.reason for bad in self._bad)),
            days=dict(frame[DAY].value_counts().iter_rows()) if DAY in frame.columns else {},
            moments=dict(_moments(frame, task.schema)) if frame.height else {},
        )
        with durable_file(task.folder / f"{name}.json") as sink:
            sink.write(json.dumps(asdict(record)).encode())

    def _write(self, frame: pl.DataFrame, path: Callable[[str], Location]) -> None:
        for sparse in self._task.schema.sparse:
            if sparse.ids == "vocabulary":
                column = frame[sparse.name]
                flat = Ragged.of(column).values if sparse.is_list else column
                write_counts(flat, path(f"{sparse.name}.counts"))
        if TIME in frame.columns:
            with durable_file(path("times")) as sink:
                sink.write(frame[TIME].to_numpy().tobytes())
        num_bytes = max(int(frame.estimated_size()), 1)
        slice_bytes = max(SLICE_BYTES, num_bytes // _MOST_SLICES)
        rows = max(1, min(_MAX_SLICE_ROWS, slice_bytes * frame.height // num_bytes))
        with durable_file(path("rows")) as sink:
            frame.write_parquet(sink, compression="lz4", statistics=False, row_group_size=rows)  # type: ignore[arg-type]


def run_name(position: int, start: int) -> str:
    """Name of the run of a file that begins after `start` records."""
    return f"{position:06d}-{start:015d}"


def read_records(folder: Location) -> list[RunRecord]:
    """Records of the finished runs, in the order of the input."""
    return [RunRecord.read(folder / name) for name in folder.names() if name.endswith(".json")]


def _path(folder: Location, name: str, suffix: str) -> Location:
    return folder / f"{name}.{suffix}"


def _shown(row: Mapping[str, Any]) -> str:
    return json.dumps(row, ensure_ascii=False, default=str)[:_TEXT_LENGTH]


def _reject_line(file: str, bad: BadRow) -> bytes:
    fields = {"file": file, "row": bad.row, "reason": bad.reason, "text": bad.text}
    return json.dumps(fields, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"


def _num_values(frame: pl.DataFrame, schema: Schema) -> int:
    lists = [sparse for sparse in schema.sparse if sparse.is_list and frame.height]
    return sum(int(frame[one.name].list.len().sum()) * (2 if one.weights else 1) for one in lists)


def _moments(frame: pl.DataFrame, schema: Schema) -> Iterator[tuple[str, tuple[int, int, int]]]:
    for dense in schema.dense:
        if dense.standardize and dense.mean is None:
            found = Moments.of(frame[dense.name].to_numpy().astype(np.float32, copy=False))
            yield dense.name, (found.count, found.total, found.squares)
