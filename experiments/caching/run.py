"""What the cache is worth on slow storage: `python -m experiments.caching [--quick]`.

Each round reads whole epochs of the same batches with the same loader: without a cache; through an
empty cache (first epoch); again (second epoch, from disk, which brings it into memory); a third time
(from memory); and as a later run would, after the memory level was emptied. The storage is local
files behind a stated latency and bandwidth. Rounds alternate what comes first. Figures:

- `second_epoch_speedup`: median over rounds of the time without a cache / that of the second epoch.
- `first_epoch_ratio`: median over rounds of the time of the first epoch / that without a cache.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from data.cache import CacheConfig, CachedSource
from data.dataset import read_manifest
from data.loader import DataLoader, LoaderConfig, ParquetSource, RowGroupSource
from data.synthetic import SyntheticConfig, generate
from experiments.caching.slow_storage import slow_filesystem
from experiments.harness.record import Record, Row

LATENCY_S: Final = 0.02
"""Time to the first byte of an object store in the same region."""
BYTES_PER_S: Final = 25e6
"""One worker's stream from such a store while many others read from it too."""
LOADER: Final = LoaderConfig(batch_size=2048)
TOUCHED_BYTES: Final = 4 * 2**30
"""Touched before the rounds, many times what one round's files need."""
EPOCHS: Final = {
    "uncached_s": "no cache",
    "first_epoch_s": "first epoch\n(fills the disk)",
    "second_epoch_s": "second epoch\n(fills the memory)",
    "third_epoch_s": "third epoch\n(from memory)",
    "later_run_s": "a later run\n(from disk)",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a small run, which overwrites no stored result")
    quick = parser.parse_args(arguments).quick
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
            row = record.measure(f"round {number}", lambda number=number: _round(folder, number))  # type: ignore[misc]
            print({name: round(value, 3) for name, value in row.items() if name != "key"}, flush=True)
    figures = _figures(record.rows)
    path = record.finish(figures)
    _draw(record.rows, config, path.with_suffix(".png"))
    print(f"{figures}\nstored in {path}")
    return 0


def _round(folder: Path, number: int) -> Row:
    """Time every kind of epoch once, the uncached one first or last."""
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
    """Use memory once before time is taken.

    A virtual machine gets real memory from its host page by page at first use, much more slowly than
    ever after. Without this the first epoch, whose files need new pages, would be charged for it.
    """
    available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    np.ones(min(num_bytes, available // 2), np.uint8)


def _slow_source(folder: Path) -> ParquetSource:
    filesystem = slow_filesystem(latency_s=LATENCY_S, bytes_per_s=BYTES_PER_S)
    return ParquetSource(str(folder), read_manifest(str(folder)), filesystem=filesystem)


def _read_epoch(folder: Path, source: RowGroupSource) -> float:
    """Seconds to get every batch of one epoch."""
    loader = DataLoader(str(folder), LOADER, source=source)
    start_s = time.perf_counter()
    batches = sum(1 for _ in loader)
    took_s = time.perf_counter() - start_s
    assert batches == len(loader)
    return took_s


def _figures(rows: Sequence[Row]) -> dict[str, float | None]:
    return {
        "second_epoch_speedup": median(row["uncached_s"] / row["second_epoch_s"] for row in rows),
        "first_epoch_ratio": median(row["first_epoch_s"] / row["uncached_s"] for row in rows),
    }


def _draw(rows: Sequence[Row], config: Mapping[str, Any], path: Path) -> None:
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(EPOCHS):
        rates = [config["rows"] / row[name] / 1e6 for row in rows]
        axes.bar(place, median(rates), color="tab:blue", alpha=0.6)
        axes.plot([place] * len(rates), rates, "k.", markersize=4)
        axes.annotate(
            f"{median(rates):.2f}", (place, max(rates)), (0, 4), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(len(EPOCHS)), list(EPOCHS.values()))
    axes.set_ylabel("million rows/s")
    axes.margins(y=0.15)
    axes.set_title(
        f"Reading an epoch from storage with {config['latency_s'] * 1e3:.0f} ms latency and "
        f"{config['bytes_per_s'] / 1e6:.0f} MB/s\n(median of {config['rounds']} rounds; dots: rounds)",
        fontsize=10,
    )
    figure.savefig(path, dpi=150)
