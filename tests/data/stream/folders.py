"""Folders with files of numbered records, and their streams."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pytest

from data.dataset import read_manifest
from data.stream.agreement import PartitionState
from data.stream.folder import NUM_PARTITIONS, FolderStream
from data.stream.reader import PartitionReader, ReaderConfig
from data.stream.source import START, Place
from data.stream.units import KnownUnits
from tests.data.stream.streams import MANIFEST, ids_of

NOW_S = 1_000_000.0


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = NOW_S
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, ids: range | list[int], age_s: float = 100.0, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame({"label": [each % 2 for each in ids], "price": [0.5] * len(ids), "item": list(ids)})
    frame.with_columns(**columns).write_parquet(path, row_group_size=3000)
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def drain(
    stream: FolderStream, places: dict[str, Place], at_most: int = 1000
) -> tuple[list[int], dict[int, str]]:
    """Read all that has come from `places` on, and move them."""
    ids, bad = [], {}
    while (fetched := stream.fetch(places, at_most)) is not None:
        assert stream.waiting(fetched.partition, fetched.begin) >= fetched.end - fetched.begin.record
        places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
        bad |= fetched.checked.bad
        if fetched.checked.rows is not None:
            found = ids_of([fetched.checked.rows])
            assert len(found) == len(fetched.checked.records)
            ids += found
    return ids, bad


def open_folder(
    folder: Path, clock: Clock, dataset: str | None = None
) -> tuple[FolderStream, dict[str, Place]]:
    """A stream of encoded records, or of the raw ones of a data set."""
    manifest = MANIFEST if dataset is None else read_manifest(dataset)
    stream = FolderStream(str(folder), manifest, dataset or "nowhere", is_encoded=dataset is None, now=clock)
    return stream, dict.fromkeys(stream.partitions, START)


def late_records(stream: FolderStream) -> int:
    """Records of all files so far that came late."""
    return sum(
        each.num_records for name in stream.partitions for each in stream.found(name, 0) if each.is_late
    )


def same_partition(number: int, ending: str = "parquet") -> list[str]:
    """Names of files whose records belong to one partition."""
    names = [f"{each}.{ending}" for each in range(10_000)]
    return [each for each in names if zlib.crc32(each.encode()) % NUM_PARTITIONS == 7][:number]


class Position(dict[str, PartitionState]):
    """States of partitions, by their names, with what is known to have come."""

    known: Mapping[str, bytes] = {}
    late = 0


def restarted(
    folder: Path,
    clock: Clock,
    states: Mapping[str, PartitionState],
    chunk: int,
    reads: int,
    dataset: str | None = None,
    backlog: int = 0,
    pause_s: float = 0,
) -> Position:
    """States after a process has read some chunks from others on, of partitions of which any was counted."""
    stream, places = open_folder(folder, clock, dataset)
    left = {name: PartitionState.from_json(states.get(name, PartitionState()).to_json()) for name in places}
    before = states if isinstance(states, Position) else Position()
    known = {name: KnownUnits() for name in places}
    known |= {name: KnownUnits.decoded(each) for name, each in before.known.items() if each}
    reader = PartitionReader(
        stream,
        left,
        ReaderConfig(ahead=100_000, chunk=chunk, backlog=backlog),
        {name: each.known for name, each in known.items()},
    )
    for _ in range(reads):
        reader.read_once()
        clock.now_s += pause_s
    stream.close()
    position = Position({name: state for name, state in reader._states.items() if state.place != START})
    position.late = before.late
    for name, units in reader.offer(0).found.items():
        known[name].add(units)
        position.late += sum(each.num_records for each in units if each.is_late)
    position.known = {name: known[name].encoded(state.place) for name, state in reader._states.items()}
    return position


def write_labels(path, num_records, label):
    frame = pl.DataFrame({"label": label, "price": 0.5, "item": range(num_records)})
    frame.write_parquet(path, row_group_size=3000) if "parquet" in path.name else frame.write_ndjson(path)
    return path
