"""What mixed precision costs in quality: `python -m experiments.precision [DATASET] [--quick]`.

`torchrun ... -m dlrm.train` trains the `tiny` recipe with several seeds in fp32 and in mixed precision, and
evaluates at the end; the data set is generated first if it is absent. The first mixed-precision run is also
evaluated every 100 steps, which does not affect its training, for the picture `learning_curve.png`. Figures:

- `auc_bf16_minus_fp32`: difference in AUC on the test day between the two runs of a seed, mean over seeds.
- `auc_bf16_minus_fp32_ci`: half the width of the 95 % confidence interval of that mean (Student's t).
- `auc_bf16`, `auc_fp32`: mean over seeds.
"""

import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Final

from matplotlib.figure import Figure

from data.dataset import read_manifest
from experiments.harness.command import experiment_parser
from experiments.harness.launch import torchrun
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Record, Row
from experiments.harness.samples import default_dataset, identity_of
from experiments.harness.statistics import Estimate

PRECISIONS: Final = ("fp32", "bf16")
SEEDS: Final = range(20)
"""Runs differ by about 0.0007 between seeds; with 5 seeds the interval would be wider than the goal."""
PROCESSES: Final = 2
GOAL: Final = 0.0005
"""Largest difference in AUC that mixed precision is allowed."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its pictures."""
    options = experiment_parser(__doc__, dataset=True).parse_args(arguments)
    folder = options.dataset or default_dataset(quick=options.quick)
    seeds, curve_steps, max_steps = (range(2), 2, 4) if options.quick else (SEEDS, 100, 0)
    config = {
        "recipe": "tiny",
        "dataset": identity_of(str(folder)),
        "samples": read_manifest(str(folder)).num_rows,
        "max_steps": max_steps,
    }
    record = Record("precision", config, seeds=list(seeds), quick=options.quick)
    for seed in seeds:
        for precision in PRECISIONS if seed % 2 == 0 else reversed(PRECISIONS):
            every = curve_steps if (seed, precision) == (seeds[0], "bf16") else 0
            row = record.measure(
                f"{precision} seed {seed}",
                lambda seed=seed, precision=precision, every=every: {  # type: ignore[misc]
                    "seed": seed,
                    "precision": precision,
                    **_train(folder, seed, precision, max_steps=max_steps, evaluate_every=every),
                },
            )
            print(f"{row['key']}: AUC {row['auc']:.5f}, {row['samples_per_s']:,.0f} samples/s", flush=True)
    return record.publish(figures_of(record.rows), draw)


def _train(folder: Path, seed: int, precision: str, *, max_steps: int, evaluate_every: int) -> Row:
    """Run the trainer once and return its metrics and its evaluations."""
    with tempfile.TemporaryDirectory(prefix="precision-") as runs:
        settings = {
            "data.uri": json.dumps(str(folder)),
            "train.seed": seed,
            "train.precision": precision,
            "train.max_steps": max_steps,
            "train.evaluate_every_steps": evaluate_every,
            "train.device": "cpu",
            "train.run_folder": json.dumps(runs),
        }
        arguments = ["--recipe", "tiny", "--set", *(f"{name}={value}" for name, value in settings.items())]
        torchrun("dlrm.train", arguments, processes=PROCESSES, threads=1)
        (run,) = Path(runs).iterdir()
        report = json.loads((run / "report.json").read_text())
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "auc": report["metrics"]["auc"],
        "log_loss": report["metrics"]["log_loss"],
        "best_auc": report["best_auc"],
        "steps": report["steps"],
        "samples_per_s": report["samples_per_s"],
        "curve": [
            {name: line[name] for name in ("samples", "auc", "log_loss")}
            for line in lines
            if line["kind"] == "evaluation"
        ],
    }


def differences(rows: Iterable[Row]) -> list[float]:
    """AUC in mixed precision minus AUC in fp32, for each seed."""
    auc = {(row["precision"], row["seed"]): row["auc"] for row in rows}
    return [auc["bf16", seed] - auc["fp32", seed] for precision, seed in auc if precision == "fp32"]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    difference = Estimate.of(differences(rows))
    means = {
        f"auc_{name}": mean(row["auc"] for row in rows if row["precision"] == name) for name in PRECISIONS
    }
    return difference.figures("auc_bf16_minus_fp32") | means


def draw(result: Row, folder: Path) -> None:
    """Draw the differences of all seeds with their mean, and the learning curve of one run."""
    rows, figures = result["rows"], result["figures"]
    found = sorted(difference * TEN_THOUSANDTHS for difference in differences(rows))
    value, ci = (figures[f"auc_bf16_minus_fp32{end}"] * TEN_THOUSANDTHS for end in ("", "_ci"))
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes = figure.subplots()
    goal = axes.axhspan(-GOAL * TEN_THOUSANDTHS, GOAL * TEN_THOUSANDTHS, color="tab:green", alpha=0.1)
    axes.axhline(0, color="black", linewidth=0.8)
    (seeds,) = axes.plot(range(len(found)), found, "o", color="tab:gray")
    interval = axes.errorbar([len(found) + 1], [value], yerr=[ci], fmt="s", color="tab:blue", capsize=5)
    labels = [f"within {GOAL}", "one seed each", f"mean {value:+.1f} and 95 % interval"]
    axes.legend([goal, seeds, interval], labels, fontsize=8)
    axes.set_xticks([(len(found) - 1) / 2, len(found) + 1], [f"{len(found)} seeds, sorted", "mean"])
    axes.set_ylabel("AUC in bf16 minus AUC in fp32, in 1e-4")
    axes.set_title("Mixed precision (bf16) against fp32: AUC after training the recipe tiny", fontsize=10)
    figure.savefig(folder / "precision.png", dpi=150)
    _draw_curve(max(rows, key=lambda row: len(row["curve"])), folder / "learning_curve.png")


def _draw_curve(row: Row, path: Path) -> None:
    """Draw the metrics of all evaluations of a run, and the best AUC that any model can reach."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, (name, label) in zip(panels, (("auc", "AUC"), ("log_loss", "log loss")), strict=True):
        axes.plot(
            [each["samples"] for each in row["curve"]],
            [each[name] for each in row["curve"]],
            marker="o",
            markersize=3,
        )
        axes.set_xlabel("training samples")
        axes.set_ylabel(f"{label} on the test days")
        axes.grid(alpha=0.3)
    label = f"best any model can reach: {row['best_auc']:.4f}"
    panels[0].axhline(row["best_auc"], color="black", linestyle="--", linewidth=1, label=label)
    panels[0].legend(loc="lower right")
    figure.suptitle(f"recipe tiny, {row['key']}")
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    raise SystemExit(main())
