"""Records that arrive at a chosen rate: a child process appends rows of a data set to a topic or a folder.

The topic is one of librdkafka's mock cluster, a broker within the child. It keeps some megabytes of each of
the topic's four partitions.
"""

import time
from collections.abc import Callable, Mapping
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final, Protocol, Self

import numpy as np
import polars as pl

from data.dataset import read_manifest

TOPIC: Final = "records"
PARTITIONS: Final = 4
"""Those of a topic of the mock cluster."""
CONNECT_S: Final = 10.0
PROPERTIES: Final = "fetch.wait.max.ms=50"
"""The mock cluster answers a reader that has read everything only after this time; other brokers answer as
soon as a message comes."""
FLUSH_S: Final = 60.0
ROW_GROUP: Final = 256
"""Rows of a row group, the unit in which ranks share a file."""


class Arrivals:
    """Rows of days of a data set that arrive in a stream, with the columns of its manifest.

    Args:
        kind: `kafka` or `folder`; a folder gets a new file every half a second.
        dataset: folder of the data set.
        days: whose rows arrive, in order.
        folder: of the stream; made anew.
        most: number of records that arrive in all; None: any, rows are repeated.
    """

    def __init__(
        self, kind: str, dataset: Path, days: list[int], folder: Path, most: int | None = None
    ) -> None:
        context = get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, kind, dataset, days, folder, most), daemon=True
        )
        self._process.start()
        other.close()

    def __enter__(self) -> Self:
        self.uri: str = self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join()

    def arrive(self, count: int = 0, per_s: float | None = None) -> int:
        """Have `count` records arrive now, and from now on so many a second; None: as many as before.

        Returns:
            Records that have arrived since the start.
        """
        self._pipe.send((count, per_s))
        arrived: int = self._pipe.recv()
        return arrived


class _Sink(Protocol):
    uri: str
    every_s: float

    def add(self, rows: np.ndarray) -> None:
        """Append rows, by their numbers."""
        ...


class _Folder:
    """A folder that gets files."""

    every_s = 0.5

    def __init__(self, rows: pl.DataFrame, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.uri, self._rows, self._folder, self._num_files = str(folder), rows, folder, 0

    def add(self, rows: np.ndarray) -> None:
        """Write a file, and give it its name when it is complete."""
        part = self._folder / f"{self._num_files:08d}.tmp"
        self._num_files += 1
        self._rows[rows].write_parquet(part, row_group_size=ROW_GROUP)
        part.rename(part.with_suffix(".parquet"))


class _Topic:
    """A topic of a broker in this process, that gets messages."""

    every_s = 0.05

    def __init__(self, rows: pl.DataFrame, folder: Path) -> None:
        from confluent_kafka import Producer  # noqa: PLC0415  # an optional dependency

        self._values = rows.write_ndjson().encode().splitlines()
        self._producer = Producer(
            {
                "bootstrap.servers": "mock",
                "test.mock.num.brokers": 1,
                "log_level": 0,
                "linger.ms": self.every_s * 1000,
                "compression.type": "zstd",
                "queue.buffering.max.messages": 1_000_000,
            }
        )
        broker = self._producer.list_topics(TOPIC, timeout=CONNECT_S).brokers[1]
        self.uri = f"kafka://{broker.host}:{broker.port}/{TOPIC}?{PROPERTIES}"
        self._num_sent = 0

    def add(self, rows: np.ndarray) -> None:
        """Send messages to the partitions in turn, and wait until the broker has them."""
        for row in rows.tolist():
            self._producer.produce(TOPIC, self._values[row], partition=self._num_sent % PARTITIONS)
            self._num_sent += 1
        if left := self._producer.flush(FLUSH_S):
            raise RuntimeError(f"{left} messages did not reach the mock cluster in {FLUSH_S:.0f} s")


SINKS: Final[Mapping[str, Callable[[pl.DataFrame, Path], _Sink]]] = {"kafka": _Topic, "folder": _Folder}


def _serve(
    pipe: Connection, kind: str, dataset: Path, days: list[int], folder: Path, most: int | None
) -> None:
    """Add records until the other end of the pipe is closed."""
    manifest = read_manifest(str(dataset))
    parts = [pl.read_parquet(dataset / part.path) for part in manifest.on_days(days).parts]
    table = pl.concat([part.select(manifest.columns) for part in parts])
    sink = SINKS[kind](table, folder)
    pipe.send(sink.uri)
    arrived, due, per_s, then = 0, 0.0, 0.0, time.monotonic()
    write_s = then + sink.every_s
    while True:
        try:
            asked = pipe.recv() if pipe.poll(max(0.0, write_s - time.monotonic())) else None
        except EOFError:
            return
        now = time.monotonic()
        due, then = due + per_s * (now - then), now
        count, rate = asked or (0, None)
        due += count
        if count or rate is not None or now >= write_s:
            end = int(due) if most is None else min(int(due), most)
            if end > arrived:
                sink.add(np.arange(arrived, end) % table.height)
                arrived = end
            write_s = now + sink.every_s
        if rate is not None:
            per_s = rate
        if asked is not None:
            pipe.send(arrived)
