"""Learning curves by batch, and gradient noise: whole runs of the trainer with `train.measure_scaling`.

Two workers train the recipe `tiny` on generated data, at every batch with the recipe's learning rates. How
many of them there are does not matter to a curve, but for rounding.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from cpr.estimator.renting.noise import GradientNoise
from cpr.estimator.renting.samples import LOWER_IS_BETTER, Target, monotone
from cpr.estimator.renting.trial import Trial
from experiments.harness.launch import torchrun
from experiments.harness.record import Row

PROCESSES: Final = 2
METRIC: Final = "log_loss"
LINES: Final = 8
"""Lines of metrics in a run."""
REACHED_SHARE: Final = 3 / 4
"""Share of its samples after which the largest batch has reached the target, in the seed that is latest."""


def measure(dataset: Path, batch: int, seed: int, samples: int, evaluated_every: int) -> Row:
    """Train once; return the learning curve, and the norms that gradient noise follows from.

    Args:
        dataset: prepared data, whose last day is evaluated.
        batch: samples of a step.
        seed: decides initial values and the order of samples.
        samples: of the run.
        evaluated_every: samples from one evaluation to the next.
    """
    with tempfile.TemporaryDirectory(prefix="renting-") as runs:
        settings = {
            "data.uri": json.dumps(str(dataset)),
            "data.global_batch_size": batch,
            "train.seed": seed,
            "train.max_steps": samples // batch,
            "train.evaluate_every_steps": max(1, evaluated_every // batch),
            "train.log_every_steps": max(1, samples // batch // LINES),
            "train.measure_scaling": "true",
            "train.device": "cpu",
            "train.run_folder": json.dumps(runs),
        }
        arguments = ["--recipe", "tiny", "--set", *(f"{name}={value}" for name, value in settings.items())]
        torchrun("dlrm.train", arguments, processes=PROCESSES, threads=1)
        (run,) = Path(runs).iterdir()
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trial = Trial.of(run.name, lines)
    assert trial.noise is not None, "there are two workers"
    return {
        "kind": "curve",
        "batch": batch,
        "seed": seed,
        "curve": trial.curves[METRIC],
        "noise_steps": trial.noise.steps,
        "noise_local": trial.noise.local,
        "noise_averaged": trial.noise.averaged,
    }


def noise_in(row: Row) -> GradientNoise:
    """Gradient noise of a run."""
    return GradientNoise(
        workers=PROCESSES,
        batch=row["batch"],
        steps=row["noise_steps"],
        local=row["noise_local"],
        averaged=row["noise_averaged"],
    )


def target_of(rows: Sequence[Row]) -> Target:
    """The target of all runs: what each run of the largest batch has reached when its last quarter begins."""
    largest = max(row["batch"] for row in rows)
    values = []
    for curve in (row["curve"] for row in rows if row["batch"] == largest):
        smooth = monotone(curve, LOWER_IS_BETTER[METRIC])
        late = [value for samples, value in smooth if samples >= REACHED_SHARE * curve[-1][0]]
        values.append(late[0] if late else smooth[-1][1])
    return Target(metric=METRIC, value=max(values))


def reached(rows: Sequence[Row], target: Target) -> dict[tuple[int, int], float | None]:
    """Samples to the target by batch and seed; None: it was not reached."""
    return {(row["batch"], row["seed"]): target.reached_after(row["curve"]) for row in rows}
