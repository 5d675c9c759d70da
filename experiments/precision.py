"""What mixed precision costs in quality: `python -m experiments.precision [DATASET] [--quick]`.

The `tiny` recipe is trained by its own command, `torchrun ... -m dlrm.train`, with several seeds in fp32 and
in mixed precision, and evaluated at the end; the data set is made first if it is absent. The first
mixed-precision run is also evaluated every 100 steps, which changes nothing in it, and its learning curve
is drawn as `learning_curve.png`. Figures:

- `auc_bf16_minus_fp32`: mean over seeds of the difference in AUC on the test day between two runs of a seed.
- `auc_bf16_minus_fp32_ci`: half the width of the 95 % confidence interval of that mean (Student's t).
- `auc_bf16`, `auc_fp32`: mean over seeds.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Final

from matplotlib.figure import Figure
from scipy.stats import t as student_t

from data.dataset import MANIFEST_NAME, read_manifest
from data.synthetic import SyntheticConfig, generate
from dlrm.telemetry.learning_curve import CurvePoint, draw_learning_curve
from experiments.harness.launch import ROOT, torchrun
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.samples import identity_of

PRECISIONS: Final = ("fp32", "bf16")
SEEDS: Final = range(20)
"""Runs differ by about 0.0007 from seed to seed: of 5, the interval would be wider than the goal."""
PROCESSES: Final = 2
CONFIDENCE: Final = 0.95


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    add = parser.add_argument
    add("dataset", nargs="?", type=Path, help="prepared data; default datasets/tiny, made if absent")
    add("--quick", action="store_true", help="a small run, which overwrites no stored result")
    options = parser.parse_args(arguments)
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
    figures = figures_of(record.rows)
    path = record.finish(figures)
    _draw(record.rows, figures, path.with_suffix(".png"))
    _draw_curve(record.rows, path.with_name("learning_curve.png"))
    print(f"{figures}\nstored in {path}")
    return 0


def default_dataset(quick: bool) -> Path:
    """The data set of `make train`, for a quick run a small one of its own; made if it is absent."""
    folder = QUICK / "dataset" if quick else ROOT / "datasets" / "tiny"
    if not (folder / MANIFEST_NAME).is_file():
        generate(SyntheticConfig(rows_per_day=10_000, days=2) if quick else SyntheticConfig(), folder)
    return folder


def _train(folder: Path, seed: int, precision: str, *, max_steps: int, evaluate_every: int) -> Row:
    """One run of the trainer: its report and its evaluations."""
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


def half_width(values: Sequence[float]) -> float:
    """Half the width of the confidence interval of the mean of independent, about normal values."""
    quantile = float(student_t.ppf((1 + CONFIDENCE) / 2, len(values) - 1))
    reach: float = quantile * stdev(values) / len(values) ** 0.5
    return reach


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """The figures from the rows of all runs."""
    found = differences(rows)
    means = {
        f"auc_{name}": mean(row["auc"] for row in rows if row["precision"] == name) for name in PRECISIONS
    }
    return {"auc_bf16_minus_fp32": mean(found), "auc_bf16_minus_fp32_ci": half_width(found), **means}


def _draw(rows: Sequence[Row], figures: dict[str, float], path: Path) -> None:
    """The difference of each seed, their mean and its confidence interval."""
    found = [difference * 1e4 for difference in differences(rows)]
    centre, reach = figures["auc_bf16_minus_fp32"] * 1e4, figures["auc_bf16_minus_fp32_ci"] * 1e4
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    axes.axhspan(-5, 5, color="tab:green", alpha=0.1, label="within 0.0005")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.plot(range(len(found)), found, "o", color="tab:gray", label="one seed")
    axes.errorbar(
        [len(found)],
        [centre],
        yerr=[reach],
        fmt="s",
        color="tab:blue",
        capsize=5,
        label="mean, 95 % interval",
    )
    axes.set_xticks([*range(len(found) + 1)], [*(f"seed {n}" for n in range(len(found))), "mean"])
    axes.set_ylabel("AUC bf16 - AUC fp32, in 1e-4")
    axes.set_title("Mixed precision against fp32, recipe tiny", fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


def _draw_curve(rows: Sequence[Row], path: Path) -> None:
    row = max(rows, key=lambda row: len(row["curve"]))
    curve = [CurvePoint(**point) for point in row["curve"]]
    draw_learning_curve(path, curve, row["best_auc"], f"recipe tiny, {row['key']}")


if __name__ == "__main__":
    raise SystemExit(main())
