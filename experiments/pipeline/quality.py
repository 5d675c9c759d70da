"""AUC under each schedule of `experiments.pipeline`: whole runs of the trainer, paired by seed.

`torchrun ... -m dlrm.train` trains the recipe `tiny` on its generated data, whose labels a teacher draws, on
2 workers, with SGD with momentum for the dense parameters, which compensation is derived from. The seed
decides initial values and the order of the samples. Every run is a row of the result.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from experiments.harness.launch import torchrun
from experiments.harness.record import Record, Row
from experiments.harness.statistics import Estimate
from experiments.pipeline.schedules import NONE

RECIPE: Final = "tiny"
PROCESSES: Final = 2
SETTINGS: Final = (
    "dense.optimizer=sgd",
    "dense.learning_rate=0.03",
    "dense.momentum=0.9",
    "train.device=cpu",
)
"""Of all runs."""
SCHEDULES: Final[dict[str, tuple[str, ...]]] = {
    NONE: (),
    "prefetch": ("train.pipeline=prefetch",),
    "waves": ("train.pipeline=waves",),
    "tick_tock": ("train.pipeline=waves", "train.wave_updates=tick_tock"),
    "delayed": ("train.pipeline=delayed",),
    "delayed_dense": ("train.pipeline=delayed", "train.late_rows=corrected"),
    "delayed_predicted": ("train.pipeline=delayed", "train.late_rows=predicted"),
    "delayed_spike": ("train.pipeline=delayed", "train.compensation=spike"),
    "delayed_velocity": ("train.pipeline=delayed", "train.compensation=velocity"),
    "delayed_spike_velocity": ("train.pipeline=delayed", "train.compensation=spike+velocity"),
    "delayed_spike_weights": ("train.pipeline=delayed", "train.compensation=spike+weights"),
}
"""Settings of each contender in addition."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Which runs there are."""

    seeds: tuple[int, ...]
    max_steps: int
    """Steps of a run, less than an epoch."""
    contenders: tuple[str, ...] = tuple(SCHEDULES)


FULL: Final = Effort(seeds=(0, 1, 2, 3, 4), max_steps=400)
QUICK: Final = Effort(seeds=(0, 1), max_steps=4, contenders=(NONE, "prefetch"))


def measure(record: Record, effort: Effort, dataset: Path) -> None:
    """Make the runs that the record does not have yet."""
    for seed in effort.seeds:
        for name in effort.contenders:
            key = f"auc {name} seed {seed}"

            def run(name: str = name, seed: int = seed) -> Row:
                return {"contender": name, "seed": seed, **_train(dataset, name, seed, effort.max_steps)}

            row = record.measure(key, run)
            print(f"{key}: AUC {row['auc']:.5f}, log loss {row['log_loss']:.5f}", flush=True)


def _train(dataset: Path, name: str, seed: int, max_steps: int) -> Row:
    """Run the trainer once and return its metrics on the test day."""
    with tempfile.TemporaryDirectory(prefix="pipeline-") as runs:
        settings = {
            "data.uri": json.dumps(str(dataset.resolve())),
            "train.seed": seed,
            "train.max_steps": max_steps,
            "train.evaluate_every_steps": 0,
            "train.run_folder": json.dumps(runs),
        }
        overrides = [*SETTINGS, *SCHEDULES[name], *(f"{key}={value}" for key, value in settings.items())]
        arguments = ["--recipe", RECIPE, "--set", *overrides]
        torchrun("dlrm.train", arguments, processes=PROCESSES, threads=1)
        (run,) = Path(runs).iterdir()
        report = json.loads((run / "report.json").read_text())
    return {"auc": report["metrics"]["auc"], "log_loss": report["metrics"]["log_loss"]}


def deltas(rows: Sequence[Row]) -> dict[str, list[float]]:
    """AUC of each contender minus that of `none` with the same seed, for each seed."""
    aucs = {(row["contender"], row["seed"]): row["auc"] for row in rows if "contender" in row}
    contenders = dict.fromkeys(name for name, _ in aucs if name != NONE)
    return {
        name: [auc - aucs[NONE, seed] for (each, seed), auc in aucs.items() if each == name]
        for name in contenders
    }


def auc_figures(rows: Sequence[Row]) -> dict[str, float]:
    """Mean difference to `none` of each contender, half its interval, and the extremes of the seeds."""
    figures: dict[str, float] = {}
    for name, found in deltas(rows).items():
        figure = f"{name}_auc_delta"
        figures |= Estimate.of(found).figures(figure)
        figures |= {f"{figure}_low": min(found), f"{figure}_high": max(found)}
    return figures
