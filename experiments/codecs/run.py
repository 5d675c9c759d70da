"""What the codecs of row saves cost in quality: `python -m experiments.codecs [DATASET] [--quick]`.

The `tiny` recipe is trained with several seeds. After three quarters of its steps everything is saved, all
rows once more by a row save with each codec, and loaded again, as if every worker had been lost at that
moment; then training goes on to the end. The optimizers' state is never encoded. Figures:

- `auc_fp16_minus_exact`, `auc_int8_minus_exact`, `auc_int4_minus_exact`: mean over seeds of the difference in
  AUC on the test day between two ends of one beginning; `..._ci`: half the width of the 95 % confidence
  interval of that mean (Student's t).
- `max_error_fp16` and so on: the largest error of a weight, as the saves state it.
- `auc_exact`: mean over seeds.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Final

from matplotlib.figure import Figure

from data.dataset import read_manifest
from experiments.harness.launch import torchrun
from experiments.harness.record import Record, Row
from experiments.harness.samples import identity_of
from experiments.precision import default_dataset, half_width

EXACT: Final = "exact"
LOSSY: Final = ("fp16", "int8", "int4")
SEEDS: Final = range(5)
PROCESSES: Final = 2


@dataclass(frozen=True, kw_only=True)
class Job:
    """One seed."""

    dataset: str
    """Prepared data."""
    seed: int
    max_steps: int
    """Of the whole run; 0: all of one epoch."""
    saved_at: float = 0.75
    """Share of the steps after which everything is saved and loaded."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("dataset", nargs="?", type=Path, help="prepared data; default datasets/tiny, made if absent")
    add("--quick", action="store_true", help="a small run, which overwrites no stored result")
    options = parser.parse_args(arguments)
    folder = options.dataset or default_dataset(quick=options.quick)
    seeds, max_steps = (range(2), 8) if options.quick else (SEEDS, 0)
    config = {
        "recipe": "tiny",
        "dataset": identity_of(str(folder)),
        "samples": read_manifest(str(folder)).num_rows,
        "max_steps": max_steps,
        "saved_at": Job.saved_at,
    }
    record = Record("codecs", config, seeds=list(seeds), quick=options.quick)
    for seed in seeds:
        job = Job(dataset=str(folder.absolute()), seed=seed, max_steps=max_steps)
        row = record.measure(f"seed {seed}", lambda job=job: _measure(job))  # type: ignore[misc]
        print(f"{row['key']}: AUC {', '.join(f'{c} {a:.5f}' for c, a in row['auc'].items())}", flush=True)
    figures = figures_of(record.rows)
    path = record.finish(figures)
    _draw(record.rows, figures, path.with_suffix(".png"))
    print(f"{figures}\nstored in {path}")
    return 0


def _measure(job: Job) -> Row:
    """What workers under torchrun measure."""
    with tempfile.TemporaryDirectory(prefix="codecs-") as scratch:
        out = Path(scratch) / "measured.json"
        request = {"job": asdict(job), "scratch": scratch, "out": str(out)}
        torchrun("experiments.codecs.worker", [json.dumps(request)], processes=PROCESSES, threads=1)
        measured: Row = json.loads(out.read_text())
    return {"seed": job.seed, **measured}


def differences(rows: Iterable[Row], codec: str) -> list[float]:
    """AUC after a save with `codec` minus AUC after an exact one, for each seed."""
    return [row["auc"][codec] - row["auc"][EXACT] for row in rows]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures = {}
    for codec in LOSSY:
        found = differences(rows, codec)
        figures[f"auc_{codec}_minus_exact"] = mean(found)
        figures[f"auc_{codec}_minus_exact_ci"] = half_width(found)
    largest = {f"max_error_{codec}": max(row["max_error"][codec] for row in rows) for codec in LOSSY}
    return {**figures, **largest, "auc_exact": mean(row["auc"][EXACT] for row in rows)}


def _draw(rows: Sequence[Row], figures: dict[str, float], path: Path) -> None:
    """Each seed's difference, its mean and the confidence interval, for each codec."""
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.8)
    for place, codec in enumerate(LOSSY):
        found = [difference * 1e4 for difference in differences(rows, codec)]
        name = f"auc_{codec}_minus_exact"
        axes.plot([place] * len(found), found, "o", color="tab:gray", label="one seed")
        axes.errorbar(
            [place + 0.15],
            [figures[name] * 1e4],
            yerr=[figures[f"{name}_ci"] * 1e4],
            fmt="s",
            color="tab:blue",
            capsize=5,
            label="mean, 95 % interval",
        )
    axes.set_xticks(
        range(len(LOSSY)), [f"{codec}\nerror <= {figures[f'max_error_{codec}']:.1g}" for codec in LOSSY]
    )
    axes.set_xlim(-0.5, len(LOSSY) - 0.5)
    axes.set_ylabel("AUC - AUC with exact rows, in 1e-4")
    axes.set_title("All rows restored from a coded save at 3/4 of training, recipe tiny", fontsize=10)
    axes.legend(*(each[:2] for each in axes.get_legend_handles_labels()), fontsize=8)
    figure.savefig(path, dpi=150)
