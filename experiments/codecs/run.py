"""What the codecs of row saves cost in quality: `python -m experiments.codecs [DATASET] [--quick]`.

The `tiny` recipe is trained with several seeds. After three quarters of its steps, a full save and a row save
of all rows with each codec are written and loaded again, as if every worker had died at that moment. Training
then continues to the end from each of them. The optimizers' state is never encoded. Figures:

- `auc_fp16_minus_exact`, `auc_int8_minus_exact`, `auc_int4_minus_exact`: difference in AUC on the test day to
  the run of the same seed that continued from exact rows, mean over seeds; `..._ci`: half the width of the
  95 % confidence interval of that mean (Student's t).
- `max_error_fp16` and so on: the largest error of a weight, as recorded in the saves.
- `auc_exact`: mean over seeds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Final

from matplotlib.figure import Figure

from data.dataset import read_manifest
from experiments.harness.command import experiment_parser
from experiments.harness.launch import measure_under_torchrun
from experiments.harness.plotting import TEN_THOUSANDTHS
from experiments.harness.record import Record, Row
from experiments.harness.samples import default_dataset, identity_of
from experiments.harness.statistics import Estimate

EXACT: Final = "exact"
LOSSY: Final = ("fp16", "int8", "int4")
SEEDS: Final = range(5)
PROCESSES: Final = 2


@dataclass(frozen=True, kw_only=True)
class CodecJob:
    """The training of one seed."""

    dataset: str
    """Prepared data."""
    seed: int
    max_steps: int
    """Steps of the whole run; 0: one epoch."""
    saved_at: float = 0.75
    """Share of the steps before the saves."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, dataset=True).parse_args(arguments)
    folder = options.dataset or default_dataset(quick=options.quick)
    seeds, max_steps = (range(2), 8) if options.quick else (SEEDS, 0)
    config = {
        "recipe": "tiny",
        "dataset": identity_of(str(folder)),
        "samples": read_manifest(str(folder)).num_rows,
        "max_steps": max_steps,
        "saved_at": CodecJob.saved_at,
    }
    record = Record("codecs", config, seeds=list(seeds), quick=options.quick)
    for seed in seeds:
        job = CodecJob(dataset=str(folder.absolute()), seed=seed, max_steps=max_steps)
        row = record.measure(f"seed {seed}", partial(_measure, job))
        print(f"{row['key']}: AUC {', '.join(f'{c} {a:.5f}' for c, a in row['auc'].items())}", flush=True)
    return record.publish(figures_of(record.rows), draw)


def _measure(job: CodecJob) -> Row:
    """Measure one seed by workers under torchrun."""
    request = {"job": asdict(job)}
    measured = measure_under_torchrun("experiments.codecs.worker", request, processes=PROCESSES, threads=1)
    return {"seed": job.seed, **measured}


def differences(rows: Iterable[Row], codec: str) -> list[float]:
    """AUC after a save with `codec` minus AUC after an exact save, for each seed."""
    return [row["auc"][codec] - row["auc"][EXACT] for row in rows]


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    figures: dict[str, float] = {}
    for codec in LOSSY:
        figures |= Estimate.of(differences(rows, codec)).figures(f"auc_{codec}_minus_exact")
    largest = {f"max_error_{codec}": max(row["max_error"][codec] for row in rows) for codec in LOSSY}
    return {**figures, **largest, "auc_exact": mean(row["auc"][EXACT] for row in rows)}


def draw(result: Row, folder: Path) -> None:
    """Draw the difference of each seed, and their mean with its interval, for each codec."""
    rows, figures = result["rows"], result["figures"]
    figure = Figure(figsize=(6.6, 3.8), layout="constrained")
    axes = figure.subplots()
    axes.axhline(0, color="black", linewidth=0.8)
    for place, codec in enumerate(LOSSY):
        found = [difference * TEN_THOUSANDTHS for difference in differences(rows, codec)]
        value, ci = (figures[f"auc_{codec}_minus_exact{end}"] * TEN_THOUSANDTHS for end in ("", "_ci"))
        (seeds,) = axes.plot([place - 0.08] * len(found), found, "o", color="tab:gray", alpha=0.7)
        interval = axes.errorbar([place + 0.08], [value], yerr=[ci], fmt="s", color="tab:blue", capsize=5)
    axes.legend([seeds, interval], [f"each of {len(rows)} seeds", "mean and 95 % interval"], fontsize=8)
    labels = [f"{codec}\nlargest error of a weight {figures[f'max_error_{codec}']:.1g}" for codec in LOSSY]
    axes.set_xticks(range(len(LOSSY)), labels, fontsize=8)
    axes.set_xlim(-0.5, len(LOSSY) - 0.5)
    axes.set_ylabel("AUC minus AUC with exact rows, in 1e-4")
    title = "AUC at the end if all rows are restored from a lossy save\nafter 3/4 of the steps (recipe tiny)"
    axes.set_title(title, fontsize=10)
    figure.savefig(folder / "codecs.png", dpi=150)
