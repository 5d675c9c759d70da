"""How fast raw Criteo lines become a data set: `python -m experiments.preparation [--quick]`.

The same lines (of `data.synthetic`, Kaggle's table sizes in full) are converted by `data.prepare`, by
polars to the same output, and by TorchRec's `BinaryCriteoUtils.tsv_to_npys`, in turns over several
rounds. Every conversion runs in a process of its own, which has imported its library and converted a
few lines before the clock starts. Figures:

- `rows_per_s`: of `data.prepare`, median over rounds, the start of its worker processes included.
- `ratio_to_torchrec`, `ratio_to_polars`: its rows/s over theirs, median over rounds, with
  `..._low` and `..._high`, the extremes.
- `peak_memory_bytes`: of `data.prepare`, all its processes together (proportional set size), in a run
  of its own, since looking costs time.
"""

import argparse
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from statistics import median
from typing import Any, Final

import psutil
import pyarrow.parquet as pq
from matplotlib.figure import Figure

from data.dataset import read_manifest
from data.synthetic import SyntheticConfig, generate
from experiments.harness.record import Record, Row
from experiments.preparation.contenders import CONTENDERS

NUM_CORES: Final = 2
WARM_UP_LINES: Final = 2_000
SAMPLE_INTERVAL_S: Final = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a small run, which overwrites no stored result")
    quick = parser.parse_args(arguments).quick
    num_rows, rounds = (20_000, 1) if quick else (2_000_000, 5)
    data = SyntheticConfig(scale=0.01 if quick else 1.0, days=1, rows_per_day=num_rows, format="tsv")
    config = {"rows": num_rows, "scale": data.scale, "cores": NUM_CORES, "rounds": rounds}
    record = Record("preparation", config, seeds=[data.seed], quick=quick)
    with tempfile.TemporaryDirectory(prefix="preparation-") as scratch:
        folder = Path(scratch)
        generate(data, folder / "raw")
        raw = folder / "raw" / "day_0"
        record.measure("same output", lambda: _compare_outputs(raw, folder))
        for number in range(rounds):
            names = [*CONTENDERS][number % 3 :] + [*CONTENDERS][: number % 3]
            for name in names:
                row = record.measure(f"{name} {number}", lambda name=name: _time(name, raw, folder))  # type: ignore[misc]
                print(f"round {number}: {name} {num_rows / row['took_s']:,.0f} rows/s", flush=True)
        memory = record.measure("memory", lambda: _peak_memory(raw, folder))
    figures = _figures(record.rows, num_rows, rounds) | {"peak_memory_bytes": memory["peak_memory_bytes"]}
    path = record.finish(figures)
    _draw(record.rows, num_rows, rounds, path.with_suffix(".png"))
    print(f"{figures}\nstored in {path}")
    return 0


def _time(name: str, raw: Path, folder: Path) -> Row:
    """Seconds of one conversion, in a process of its own."""
    process, pipe = _start(name, raw, folder)
    took_s = pipe.recv()
    process.join()
    return {"took_s": took_s}


def _start(name: str, raw: Path, folder: Path) -> "tuple[SpawnProcess, Connection[float, float]]":
    """Begin a conversion in a process that may use `NUM_CORES` cores, and so may its children."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_convert, args=(name, raw, folder, theirs))
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(allowed)[:NUM_CORES])
    try:
        process.start()
    finally:
        os.sched_setaffinity(0, allowed)
    theirs.close()
    return process, ours


def _convert(name: str, raw: Path, folder: Path, pipe: "Connection[float, float]") -> None:
    convert = CONTENDERS[name]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        warm_up, few = Path(scratch) / "warm-up", Path(scratch) / "day_0"
        warm_up.mkdir()
        with raw.open("rb") as lines:
            few.write_bytes(b"".join(next(lines) for _ in range(WARM_UP_LINES)))
        convert([few], warm_up, NUM_CORES)
        out = Path(scratch) / "out"
        out.mkdir()
        start_s = time.perf_counter()
        convert([raw], out, NUM_CORES)
        took_s = time.perf_counter() - start_s
    pipe.send(took_s)


def _compare_outputs(raw: Path, folder: Path) -> Row:
    """Whether ours and polars' output are the same rows.

    Raises:
        RuntimeError: they are not: nothing here would be a comparison.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        out = Path(scratch)
        for name in ("ours", "polars"):
            CONTENDERS[name]([raw], out, NUM_CORES)
        first_row, theirs = 0, pq.read_table(out / "polars.parquet")
        for part in read_manifest(str(out / "ours")).parts:
            mine = pq.read_table(out / "ours" / part.path, partitioning=None)
            if not mine.equals(theirs.slice(first_row, part.num_rows)):
                raise RuntimeError(f"{part.path} is not what polars makes of the same lines")
            first_row += part.num_rows
        if first_row != theirs.num_rows:
            raise RuntimeError(f"{first_row} rows are not the {theirs.num_rows} that polars makes")
    return {"rows_compared": first_row}


def _peak_memory(raw: Path, folder: Path) -> Row:
    """Peak of the memory of all processes of one conversion together."""
    process, pipe = _start("ours", raw, folder)
    peak_bytes, done = 0, threading.Event()

    def sample() -> None:
        nonlocal peak_bytes
        while not done.wait(SAMPLE_INTERVAL_S):
            peak_bytes = max(peak_bytes, tree_memory_bytes(process.pid))

    sampler = threading.Thread(target=sample)
    sampler.start()
    pipe.recv()
    done.set()
    sampler.join()
    process.join()
    return {"peak_memory_bytes": peak_bytes}


def tree_memory_bytes(pid: int | None) -> int:
    """Proportional set size of a process and all its descendants."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0
    total = 0
    for process in tree:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total


def _rates(rows: Sequence[Row], name: str, num_rows: int, rounds: int) -> list[float]:
    took_s = {row["key"]: row["took_s"] for row in rows if "took_s" in row}
    return [num_rows / took_s[f"{name} {number}"] for number in range(rounds)]


def _figures(rows: Sequence[Row], num_rows: int, rounds: int) -> dict[str, Any]:
    mine = _rates(rows, "ours", num_rows, rounds)
    figures = {"rows_per_s": median(mine)}
    for rival in ("torchrec", "polars"):
        ratios = [a / b for a, b in zip(mine, _rates(rows, rival, num_rows, rounds), strict=True)]
        figures |= {
            f"ratio_to_{rival}": median(ratios),
            f"ratio_to_{rival}_low": min(ratios),
            f"ratio_to_{rival}_high": max(ratios),
        }
    return figures


def _draw(rows: Sequence[Row], num_rows: int, rounds: int, path: Path) -> None:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    labels = {"torchrec": "TorchRec\ntsv_to_npys", "ours": "data.prepare", "polars": "polars\nscan and sink"}
    for place, name in enumerate(labels):
        rates = [rate / 1e3 for rate in _rates(rows, name, num_rows, rounds)]
        axes.bar(place, median(rates), color="tab:blue" if name == "ours" else "tab:gray", alpha=0.6)
        axes.plot([place] * len(rates), rates, "k.", markersize=4)
        axes.annotate(
            f"{median(rates):,.0f}", (place, max(rates)), (0, 4), textcoords="offset points", ha="center"
        )
    axes.set_xticks(range(len(labels)), list(labels.values()))
    axes.set_ylabel("thousand rows/s")
    axes.margins(y=0.15)
    axes.set_title(f"Converting {num_rows:,} raw lines on {NUM_CORES} cores ({rounds} rounds)", fontsize=10)
    figure.savefig(path, dpi=150)
