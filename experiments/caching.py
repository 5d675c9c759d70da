"""What the cache gains on slow storage: `python -m experiments.caching [--quick]`.

Each round reads whole epochs of the same batches with the same loader: without a cache; through an empty
cache (first epoch); again (second epoch, from disk, which fills the memory level); a third time (from
memory); and as a later run would, with an empty memory level. The storage is local files behind a stated
latency and bandwidth. Every other round reads the epoch without a cache last. Figures:

- `second_epoch_speedup`: median over rounds of the time without a cache / that of the second epoch.
- `first_epoch_ratio`: median over rounds of the time of the first epoch / that without a cache.
"""

import io
import os
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from matplotlib.figure import Figure
from pyarrow import fs

from data.cache import CacheConfig, CachedSource
from data.dataset import read_manifest
from data.loader import DataLoader, LoaderConfig, ParquetSource, RowGroupSource
from data.synthetic import SyntheticConfig, generate
from experiments.harness.command import experiment_parser
from experiments.harness.plotting import median_bars
from experiments.harness.record import Record, Row

LATENCY_S: Final = 0.02
"""Time to the first byte of an object store in the same region."""
BYTES_PER_S: Final = 25e6
"""One worker's stream from such a store while many others read from it too."""
LOADER: Final = LoaderConfig(batch_size=2048)
TOUCHED_BYTES: Final = 4 * 2**30
"""Memory that is touched before the rounds, many times what the files of a round need."""
EPOCHS: Final = {
    "uncached_s": "no cache",
    "first_epoch_s": "first epoch (fills the disk cache)",
    "second_epoch_s": "second epoch (from disk, fills the memory)",
    "third_epoch_s": "third epoch (from memory)",
    "later_run_s": "a later run (from disk)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    quick = experiment_parser(__doc__).parse_args(arguments).quick
    data = SyntheticConfig(
        days=1, rows_per_day=2**18 if quick else 2**20, rows_per_block=32_768, rows_per_file=262_144
    )
    rounds = 1 if quick else 7
    config = {
        "rows": data.rows_per_day,
        "rows_per_row_group": data.rows_per_block,
        "batch_size": LOADER.batch_size,
        "latency_s": LATENCY_S,
        "bytes_per_s": BYTES_PER_S,
        "rounds": rounds,
    }
    record = Record("caching", config, seeds=[data.seed], quick=quick)
    with tempfile.TemporaryDirectory(prefix="caching-") as scratch:
        folder = Path(scratch) / "data"
        generate(data, folder)
        _read_epoch(folder, ParquetSource(str(folder), read_manifest(str(folder))))  # warms the process up
        _touch_memory(0 if quick else TOUCHED_BYTES)
        for number in range(rounds):
            row = record.measure(f"round {number}", partial(_round, folder, number))
            print({name: round(value, 3) for name, value in row.items() if name != "key"}, flush=True)
    rows = record.rows
    figures = {
        "second_epoch_speedup": median(row["uncached_s"] / row["second_epoch_s"] for row in rows),
        "first_epoch_ratio": median(row["first_epoch_s"] / row["uncached_s"] for row in rows),
    }
    return record.publish(figures, draw)


def _round(folder: Path, number: int) -> Row:
    """Time every kind of epoch once, the one without a cache first or last."""
    row: Row = {}
    if number % 2 == 0:
        row["uncached_s"] = _read_epoch(folder, _slow_source(folder))
    with tempfile.TemporaryDirectory(prefix="cache-", dir=folder.parent) as cache_folder:
        config = CacheConfig(folder=Path(cache_folder), disk_limit_bytes=2**30, memory_limit_bytes=2**30)
        cache = CachedSource(_slow_source(folder), config)
        row["first_epoch_s"] = _read_epoch(folder, cache)
        row["second_epoch_s"] = _read_epoch(folder, cache)
        row["third_epoch_s"] = _read_epoch(folder, cache)
        cache.close()
        later = CachedSource(_slow_source(folder), config)
        row["later_run_s"] = _read_epoch(folder, later)
        later.close()
    if number % 2 == 1:
        row["uncached_s"] = _read_epoch(folder, _slow_source(folder))
    return row


def _touch_memory(num_bytes: int) -> None:
    """Use memory once before the clock starts.

    A virtual machine gets real memory from its host page by page at first use, much more slowly than later.
    Otherwise that time would count for the first epoch, whose files need new pages.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    np.ones(min(num_bytes, available // 2), np.uint8)


class _SlowFile(io.FileIO):
    """A local file with reads as slow as over a network."""

    def __init__(self, path: str, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(path, "rb")
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

    def read(self, size: int | None = -1) -> bytes:
        asked_s = time.monotonic()
        content = super().read(-1 if size is None else size) or b""
        arrives_s = asked_s + self._latency_s + len(content) / self._bytes_per_s
        time.sleep(max(0.0, arrives_s - time.monotonic()))
        return content

    def size(self) -> int:
        return Path(str(self.name)).stat().st_size


class _SlowHandler(fs.FSSpecHandler):  # type: ignore[misc]  # pyarrow is untyped
    def __init__(self, latency_s: float, bytes_per_s: float) -> None:
        super().__init__(LocalFileSystem())
        self._latency_s, self._bytes_per_s = latency_s, bytes_per_s

    def open_input_file(self, path: str) -> pa.PythonFile:
        return pa.PythonFile(_SlowFile(path, self._latency_s, self._bytes_per_s), mode="r")


def slow_filesystem(*, latency_s: float, bytes_per_s: float) -> fs.PyFileSystem:
    """A pyarrow filesystem of local files in the place of a remote one.

    However fast the disk is, a request takes the latency and then the time of its bytes, and requests for one
    file run one after the other.
    """
    return fs.PyFileSystem(_SlowHandler(latency_s, bytes_per_s))


def _slow_source(folder: Path) -> ParquetSource:
    filesystem = slow_filesystem(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
    return ParquetSource(str(folder), read_manifest(str(folder)), filesystem=filesystem)


def _read_epoch(folder: Path, source: RowGroupSource) -> float:
    """Read every batch of one epoch and return the seconds that takes."""
    loader = DataLoader(str(folder), LOADER, source=source)
    start_s = time.perf_counter()
    batches = sum(1 for _ in loader)
    took_s = time.perf_counter() - start_s
    assert batches == len(loader)
    return took_s


def draw(result: Row, folder: Path) -> None:
    """Draw rows/s of every kind of epoch."""
    config = result["config"]
    rates = {
        label: [config["rows"] / row[name] / 1e6 for row in result["rows"]] for name, label in EPOCHS.items()
    }
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    median_bars(axes, rates, highlighted=[*rates][1:], digits=2)
    axes.set_xlabel(f"million rows/s (bar: median; dots: {config['rounds']} rounds)")
    axes.set_title(
        f"Reading an epoch from storage with\n{config['latency_s'] * 1e3:.0f} ms latency and "
        f"{config['bytes_per_s'] / 1e6:.0f} MB/s",
        fontsize=10,
    )
    figure.savefig(folder / "caching.png", dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
