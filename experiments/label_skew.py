"""Does it matter which rank has which label? `python -m experiments.label_skew [--rounds N] [--quick]`.

ScaDLES (arXiv 2301.08897) has workers send each other records where labels are skewed between them. Here, two
workers train the recipe `tiny` on a folder of files as a stream. In the runs `skewed`, all clicks come to one
rank and all other records to the other one; in the runs `mixed`, the same records come at the same times in
files of the same sizes, but by chance. In the runs `dealt`, labels are skewed, and ranks deal half of their
records among both by chance (`stream.inject`), in the runs `all_dealt` all. Test data are those of another
day. Dense gradients are averaged exactly (`dense`), or a hundredth of their values, which ranks select in
turn by their own gradients (`topk`). Figures:

- `skew_auc_delta_EXCHANGE`, `dealt_auc_delta_EXCHANGE`, `all_dealt_auc_delta_EXCHANGE`, with half their 95 %
  intervals (`..._ci`): AUC of skewed or dealt minus mixed labels, mean over seeds.

Interrupted, the command resumes where it stopped; `--keep` keeps rows that an earlier commit has measured.
"""

import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

import numpy as np
import polars as pl
from matplotlib.figure import Figure

from data.dataset import read_manifest
from data.stream.files import PIECE_RECORDS
from data.synthetic import SyntheticConfig
from experiments.harness.command import experiment_parser
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Record, Row
from experiments.harness.samples import generated
from experiments.harness.statistics import Estimate
from experiments.streaming.runs import WORKERS, training

__all__ = ["draw", "main"]

SEEDS: Final = 10
"""With 5, the intervals would be as wide as the margin."""
EXCHANGES: Final[Mapping[str, dict[str, object]]] = {
    "dense": {},
    "topk": {"comm.exchange": "star", "comm.ratio": 0.01},
}
LABELS: Final[Mapping[str, dict[str, object]]] = {
    "skewed": {},
    "mixed": {},
    "dealt": {"stream.inject": 0.5},
    "all_dealt": {"stream.inject": 1.0},
}
COMPARED: Final = {"skew": "skewed", "dealt": "dealt", "all_dealt": "all_dealt"}
"""By the beginnings of figures."""
OLD_S: Final = 86_400.0
"""Age of the files when a run begins, so that all of them are there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=SEEDS, keep=True).parse_args(arguments)
    rows_per_day, seeds, batch = (2048, 2, 128) if options.quick else (150_000, options.rounds, 512)
    config = {"recipe": "tiny", "rows_per_day": rows_per_day, "seeds": seeds, "batch": batch}
    record = Record("label_skew", config, seeds=list(range(seeds)), quick=options.quick)
    if options.keep:
        record.keep(lambda _: True)
    with tempfile.TemporaryDirectory(prefix="label-skew-") as scratch:
        folder = Path(scratch)
        dataset = generated(SyntheticConfig(days=3, rows_per_day=rows_per_day), folder / "data")
        for labels in LABELS:
            write_stream(dataset, folder / labels, is_skewed=labels != "mixed")
        cases = [
            (seed, exchange, labels)
            for seed in range(seeds)
            for exchange in EXCHANGES
            for labels in list(LABELS)[:: -1 if seed % 2 else 1]
        ]
        for seed, exchange, labels in cases:
            settings = (
                EXCHANGES[exchange]
                | LABELS[labels]
                | {
                    "data.global_batch_size": batch,
                    "train.seed": seed,
                    "stream.uri": folder / labels,
                }
            )
            case = {"exchange": exchange, "labels": labels, "seed": seed}
            measure = partial(_train, case, dataset, folder / "runs", settings)
            row = record.measure(f"{exchange} {labels} {seed}", measure)
            print(f"{row['key']}: AUC {row['auc']:.5f}", flush=True)
    return record.publish(figures_of(record.rows), draw)


def write_stream(dataset: Path, folder: Path, *, is_skewed: bool) -> None:
    """Write the rows of all days of a data set but the last as files of a stream, two for some thousand rows.

    Args:
        dataset: a data set's folder.
        folder: for the files; files of rank 0 have as many records as there are clicks among these rows.
        is_skewed: whether these are the clicks.
    """
    manifest = read_manifest(str(dataset))
    parts = [dataset / part.path for part in manifest.on_days(list(manifest.days[:-1])).parts]
    folder.mkdir()
    generator, written_s = np.random.default_rng(0), time.time() - OLD_S
    for number, rows in enumerate(pl.read_parquet(parts).iter_slices(PIECE_RECORDS)):
        is_click = rows["label"].to_numpy() == 1
        is_first = is_click if is_skewed else generator.permutation(is_click)
        for rank, chosen in enumerate((is_first, ~is_first)):
            path = folder / name_for(rank, number)
            rows.filter(pl.Series(chosen)).write_parquet(path)
            os.utime(path, (written_s + number, written_s + number))


def name_for(rank: int, number: int) -> str:
    """A file's name by which its records, of one piece, come to a rank: see `FolderStream`."""
    names = (f"{number:05d}-{each}.parquet" for each in range(1000))
    return next(name for name in names if zlib.crc32(name.encode()) % WORKERS == rank)


def _train(case: Row, dataset: Path, runs: Path, settings: Mapping[str, object]) -> Row:
    """Train on a stream; the case with the AUC."""
    stream = {"stream.rows": "encoded", "stream.end_after_s": 5}
    try:
        with training(dataset, runs, {**settings, **stream}) as run:
            return {**case, "auc": run.report()["metrics"]["auc"]}
    finally:
        shutil.rmtree(runs, ignore_errors=True)


def deltas(rows: Sequence[Row], exchange: str, labels: str) -> list[float]:
    """AUC minus that with mixed labels, by seed."""
    auc = {(row["labels"], row["seed"]): row["auc"] for row in rows if row["exchange"] == exchange}
    return [auc[labels, seed] - auc["mixed", seed] for kind, seed in auc if kind == "mixed"]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for name, labels in COMPARED.items():
        for exchange in EXCHANGES:
            found = Estimate.of(deltas(rows, exchange, labels))
            figures |= found.figures(f"{name}_auc_delta_{exchange}")
    return figures


def draw(result: Row, folder: Path) -> None:
    """Draw the differences of all seeds with their means."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.8)
    for number, (exchange, (name, labels)) in enumerate(product(EXCHANGES, COMPARED.items())):
        found = [each * TEN_THOUSANDTHS for each in deltas(result["rows"], exchange, labels)]
        axes.plot([number - 0.15] * len(found), found, "o", color="tab:gray")
        value, half_width = (
            result["figures"][f"{name}_auc_delta_{exchange}{end}"] * TEN_THOUSANDTHS for end in ("", "_ci")
        )
        axes.errorbar([number + 0.15], [value], yerr=[half_width], fmt="s", color="tab:blue", capsize=5)
    names = [f"{exchange},\n{labels}" for exchange, labels in product(EXCHANGES, COMPARED.values())]
    axes.set_xticks(range(len(names)), names)
    axes.set_xlabel("exchange of dense gradients, and labels")
    axes.set_ylabel("AUC minus that of mixed labels, in 1e-4")
    figure.savefig(folder / "label_skew.png", dpi=110)


if __name__ == "__main__":
    raise SystemExit(main())
