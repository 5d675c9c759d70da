"""What tracking updated rows costs a training step: `python -m experiments.tracking [--quick]`.

A row save needs to know which rows to save. MFU counts the accesses of the rows, SSU keeps a bounded sample
of the used rows, SCAR compares rows with their last saved values, and TorchRec's `ModelDeltaTracker` records
ids. One process with two threads trains the `terabyte` recipe in fp32 on smaller tables, batch 2048, with
every tracker in turn and without one, two steps each, in a new random order every round (SCAR and TorchRec in
some rounds only). All tables are tracked. The effect is a hundredth of a step and smaller than the variation
of steps, hence the hundreds of rounds. A launch is a row of the result; an interrupted command continues with
the next. Figures:

- `mfu_step_share`, `mfu_all_step_share`, `ssu_step_share`, `scar_step_share`, `torchrec_step_share`:
  additional time of a tracked step, as a share of an untracked one: the geometric mean over all rounds of the
  ratio within a round, minus 1; with `..._low` and `..._high`, a 95 % confidence interval (bootstrap over
  rounds). It is a mean because MFU and SSU do most of their work in one step of twenty or more, which a
  median would not see. Ratios above 1.5 are stalls of the machine and count as 1.5. SCAR does nothing in a
  step. `mfu` counts one of 8 batches, as where saves are so far apart that even the least used of the chosen
  rows had 256 accesses (`cpr.priority.frequency`); with fewer MFU counts more batches, and below 64 all of
  them: `mfu_all`. These tables take 7,000 steps between saves for every other batch and 30,000 for one of 8,
  with ids skewed like Criteo's, and larger ones more in proportion to their rows; the job of
  `experiments.overhead` would have some 400,000.
- `mfu_calls_share`, `mfu_all_calls_share`, `ssu_calls_share`: time of the tracker's own calls in those steps,
  over that of the steps: the median over launches, with `..._low` and `..._high`, the extremes. It lacks what
  tracking costs by pushing others out of the CPU's caches, and varies much less than the difference of steps.
- `mfu_bytes_per_row` and so on: memory of a tracker per row of the tables; MFU and SSU also have
  `backlog_bytes` for each FBGEMM module, whatever the size of its tables.
- `mfu_choose_s` and so on: time that training waits for the choice of rows, once per save.
- `step_s`: median time of an untracked step.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cpr.priority.backlog import CAPACITY
from experiments.checkpointing.job import TrainingJob
from experiments.harness.command import experiment_parser
from experiments.harness.launch import measure_under_torchrun
from experiments.harness.record import Record, Row
from experiments.harness.statistics import bootstrap, median_figures

NONE: Final = "none"
TORCHREC: Final = "torchrec"
MFU: Final = "mfu"
MFU_ALL: Final = "mfu_all"
SCHEMES: Final = (MFU, "ssu", "scar")
CALLED: Final = (MFU, MFU_ALL, "ssu")
"""Trackers of ours that do something in a step."""
CONTENDERS: Final = (NONE, MFU_ALL, *SCHEMES, TORCHREC)
RARE: Final = ("scar", TORCHREC)
"""Contenders that take part in some rounds only."""
LIMITS: Final = {MFU: 0.003, "ssu": 0.005}
"""Goals for the additional time, as shares of a step."""
LAUNCHES: Final = 3
LABELS: Final = {
    MFU: "MFU: counts\naccesses of rows",
    MFU_ALL: "MFU before it samples:\ncounts those of all batches",
    "ssu": "SSU: keeps a bounded\nsample of used rows",
    "scar": "SCAR: compares rows with\ntheir last saved values",
    TORCHREC: "TorchRec's tracker:\nrecords ids of all batches",
}
CHOOSES: Final = 5
"""Number of choices of rows that are timed."""
STALLED: Final = 1.5
"""Ratio of two steps above which the machine must have stalled."""


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Number of rounds and steps in a launch."""

    rounds: int = 300
    rare: int = 5
    """Every how many rounds the contenders of `RARE` take part."""
    steps: int = 2
    """Timed steps of each contender in a round, and steps before each choice of rows."""
    warm_up_steps: int = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    quick = experiment_parser(__doc__).parse_args(arguments).quick
    job, pace, launches = TrainingJob(rows=100_000, precision="fp32"), Rounds(), LAUNCHES
    if quick:
        job, pace = (
            replace(job, rows=2000, global_batch_size=256),
            Rounds(rounds=4, rare=2, steps=1, warm_up_steps=2),
        )
        launches = 1
    config = {
        "rows": job.rows,
        "precision": job.precision,
        "batch_size": job.global_batch_size,
        "launches": launches,
        "contenders": CONTENDERS,
    }
    record = Record("tracking", config | asdict(pace), seeds=[job.seed], quick=quick)
    for number in range(launches):
        record.measure(f"launch {number}", partial(_launch, job, pace))
        print(f"launch {number}: measured", flush=True)
    return record.publish(figures_of(record.rows, job.seed), draw)


def _launch(job: TrainingJob, pace: Rounds) -> Row:
    """Measure one launch under torchrun."""
    request = {"job": asdict(job), "pace": asdict(pace)}
    return measure_under_torchrun("experiments.tracking.worker", request, processes=1, threads=2)


def figures_of(rows: Sequence[Row], seed: int) -> dict[str, float]:
    """All figures.

    Args:
        rows: of the result, one for each launch.
        seed: of the bootstrap.
    """
    rounds = [each for row in rows for each in row["rounds"]]
    figures: dict[str, float] = {}
    for name in CONTENDERS[1:]:
        ratios = [each[name] / each[NONE] for each in rounds if name in each]
        low, high = bootstrap(ratios, _mean_ratio, seed)
        figures |= {
            f"{name}_step_share": _mean_ratio(np.array([ratios])).item() - 1,
            f"{name}_step_share_low": low - 1,
            f"{name}_step_share_high": high - 1,
        }
    for name in CALLED:
        figures |= median_figures(f"{name}_calls_share", [row["calls"][name] for row in rows])
    for scheme in SCHEMES:
        choosing = [row["choosing"][scheme] for row in rows]
        figures[f"{scheme}_bytes_per_row"] = choosing[0]["bytes_per_row"]
        figures[f"{scheme}_choose_s"] = median(each["choose_s"] for each in choosing)
    backlog = 4 * (1 + CAPACITY)
    return figures | {"step_s": median(each[NONE] for each in rounds), "backlog_bytes": backlog}


def _mean_ratio(ratios: Any) -> Any:
    """Geometric mean of each row of ratios `[R, n]`, with stalls cut to `STALLED`."""
    stalled = np.log(STALLED)
    return np.exp(np.clip(np.log(ratios), -stalled, stalled).mean(axis=1))


def draw(result: Row, folder: Path) -> None:
    """Draw the additional time of a step, the time of a choice and the memory of every tracker."""
    figures = result["figures"]
    # older results lack some
    labels = {name: label for name, label in LABELS.items() if f"{name}_step_share" in figures}
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    steps, saves, memory = figure.subplots(1, 3, width_ratios=[1.2, 1, 1], sharey=True)
    places = range(len(labels))
    for place, name in enumerate(labels):
        share, low, high = (100 * figures[f"{name}_step_share{end}"] for end in ("", "_low", "_high"))
        steps.barh(place, share, xerr=[[share - low], [high - share]], capsize=4, color="tab:blue", alpha=0.6)
        steps.text(max(high, share) + 0.15, place, f"{share:.2f} %", va="center", fontsize=8)
        if name in LIMITS:
            limit = 100 * LIMITS[name]
            steps.plot([limit] * 2, [place - 0.4, place + 0.4], color="tab:red", label="goal: at most")
    steps.axvline(0, color="black", linewidth=0.8)
    steps.set(title="additional time of a training step", xlabel="% of a step, with 95 % interval")
    steps.set_xlim(right=2.2)
    steps.legend(*(each[:1] for each in steps.get_legend_handles_labels()), fontsize=8, loc="upper right")
    steps.set_yticks(places, list(labels.values()), fontsize=8)
    steps.invert_yaxis()
    for axes, title, unit, ending, scale in (
        (saves, "choice of the rows of one save", "ms", "choose_s", 1000),
        (memory, "memory of the tracker", "bytes per row", "bytes_per_row", 1),
    ):
        trackers = [name.removesuffix("_all") for name in labels if name != TORCHREC]
        values = [scale * figures[f"{name}_{ending}"] for name in trackers]
        _bars(axes, values, list(labels).index(TORCHREC))
        axes.set(title=title, xlabel=f"{unit}, logarithmic", xscale="log")
    figure.savefig(folder / "tracking.png", dpi=150)


def _bars(axes: Axes, values: Sequence[float], unmeasured: int) -> None:
    axes.bar_label(axes.barh(range(len(values)), values, color="tab:blue", alpha=0.6), fmt="%.3g", padding=3)
    axes.text(0.03, unmeasured, "not measured", fontsize=8, transform=axes.get_yaxis_transform())
    axes.margins(x=0.2)
