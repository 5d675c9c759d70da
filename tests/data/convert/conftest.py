"""Tables in all formats, and jobs that run in the test's own process."""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from data.convert.config import ConvertConfig
from data.convert.job import convert
from data.dataset import DatasetManifest
from data.jobs.location import Location
from data.jobs.tasks import Workers
from data.schema import Schema

Row = dict[str, Any]


class Inline(Executor):
    """Runs calls where they are submitted."""

    def submit(self, fn, /, *args, **kwargs):
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@contextmanager
def inline_workers(num_processes: int, preload: str) -> Iterator[Workers]:
    yield Workers(executor=Inline(), count=lambda: 1)


@pytest.fixture
def job(monkeypatch) -> Callable[..., DatasetManifest]:
    """Convert in this process, with any size of blocks."""
    monkeypatch.setattr("data.convert.job.local_workers", inline_workers)

    def run(schema: Schema, files: Sequence[Path], out: Path, block_bytes: int | None = None, **changes: Any):
        with pytest.MonkeyPatch.context() as patch:
            if block_bytes is not None:
                patch.setattr(ConvertConfig, "block_bytes", block_bytes)
            places = tuple(map(Location.of, files))
            return convert(ConvertConfig(schema=schema, files=places, out=Location.of(out), **changes))

    return run


def digests(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write_csv(path: Path, rows: Sequence[Row], separator: str = ",") -> Path:
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream, delimiter=separator)
        writer.writerow(rows[0])
        for row in rows:
            lists = {
                name: "|".join(map(_text, value)) for name, value in row.items() if isinstance(value, list)
            }
            writer.writerow([{**row, **lists}[name] for name in rows[0]])
    return path


def write_jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=len(row) % 2 == 0) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: Sequence[Row], **kinds: Any) -> Path:
    pl.DataFrame(rows, schema_overrides=kinds).write_parquet(path, row_group_size=7)
    return path


def _text(value: object) -> str:
    return "" if value is None else str(value)
