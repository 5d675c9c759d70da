"""What tracking costs a training step: `python -m experiments.tracking [--quick]`.

One process with two threads trains the `terabyte` recipe on tables that fit, batch 2048, and is tracked in
turn by nothing, by MFU and by SSU, two steps each, in a new random order every round; in some rounds also by
SCAR and by TorchRec's own `ModelDeltaTracker` (which only notes ids). All tables are prioritised. What is
looked for is a hundredth of a step, and steps vary by more than that: it takes hundreds of rounds. A launch
is a row of the result; interrupted, the command goes on with the next. Figures:

- `mfu_step_share`, `ssu_step_share`, `scar_step_share`, `torchrec_step_share`: by how much a step takes
  longer, as a share of a step that nobody tracks: the geometric mean over all rounds of the ratio within a
  round, less 1; with `..._low` and `..._high`, a 95 % confidence interval (bootstrap over rounds). A mean,
  because MFU and SSU put most of their work off to one step in twenty or more, which a median would not see;
  ratios beyond 1.5, stalls of the machine, count as that. SCAR does nothing in a step.
- `mfu_bytes_per_row` and so on: memory that a tracker keeps, by row of the tables; MFU and SSU also have
  `backlog_bytes` for each FBGEMM module, whatever the size of its tables.
- `mfu_choose_s` and so on: how long training waits for the rows to be chosen, once for each save.
- `step_s`: a step that nobody tracks.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from matplotlib.figure import Figure

from cpr.priority.backlog import CAPACITY
from experiments.checkpointing.job import Job
from experiments.harness.launch import torchrun
from experiments.harness.record import Record, Row

NONE: Final = "none"
TORCHREC: Final = "torchrec"
SCHEMES: Final = ("mfu", "ssu", "scar")
CONTENDERS: Final = (NONE, *SCHEMES, TORCHREC)
RARE: Final = ("scar", TORCHREC)
"""Contenders without a limit, which take part in some rounds only."""
LIMITS: Final = {"mfu": 0.01, "ssu": 0.005}
"""Shares of a step that are to be kept."""
LAUNCHES: Final = 3
CHOOSES: Final = 5
"""How often choosing is timed."""
RESAMPLES: Final = 2000
STALLED: Final = 1.5
"""Ratio of two steps that says more about the machine than about what they did."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How much is measured in a launch."""

    rounds: int = 600
    rare: int = 5
    """One of so many rounds has the contenders of `RARE` too."""
    steps: int = 2
    """Timed steps of each contender in a round, and steps before rows are chosen."""
    warm_up_steps: int = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a small run, which overwrites no stored result")
    quick = parser.parse_args(arguments).quick
    job, pace, launches = Job(rows=100_000), Pace(), LAUNCHES
    if quick:
        job, pace = Job(rows=2000, global_batch_size=256), Pace(rounds=4, rare=2, steps=1, warm_up_steps=2)
        launches = 1
    config = {
        "rows": job.rows,
        "batch_size": job.global_batch_size,
        "launches": launches,
        "contenders": CONTENDERS,
    }
    record = Record("tracking", config | asdict(pace), seeds=[job.seed], quick=quick)
    for number in range(launches):
        record.measure(f"launch {number}", lambda: _launch(job, pace))
        print(f"launch {number}: {_shares(figures_of(record.rows, job.seed))}", flush=True)
    figures = figures_of(record.rows, job.seed)
    path = record.finish(figures)
    _draw(figures, path.with_suffix(".png"))
    print(f"{figures}\nstored in {path}")
    return 0


def _launch(job: Job, pace: Pace) -> Row:
    """What a worker under torchrun measures."""
    with tempfile.TemporaryDirectory(prefix="tracking-") as scratch:
        out = Path(scratch) / "measured.json"
        request = {"job": asdict(job), "pace": asdict(pace), "out": str(out)}
        torchrun("experiments.tracking.worker", [json.dumps(request)], processes=1, threads=2)
        measured: Row = json.loads(out.read_text())
        return measured


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
        low, high = _confidence(ratios, seed)
        figures |= {
            f"{name}_step_share": _mean_ratio(np.array([ratios])).item() - 1,
            f"{name}_step_share_low": low - 1,
            f"{name}_step_share_high": high - 1,
        }
    for scheme in SCHEMES:
        choosing = [row["choosing"][scheme] for row in rows]
        figures[f"{scheme}_bytes_per_row"] = choosing[0]["bytes_per_row"]
        figures[f"{scheme}_choose_s"] = median(each["choose_s"] for each in choosing)
    backlog = 4 * (1 + CAPACITY)
    return figures | {"step_s": median(each[NONE] for each in rounds), "backlog_bytes": backlog}


def _confidence(values: Sequence[float], seed: int) -> tuple[float, float]:
    """95 % interval of the mean ratio, by the percentiles of a bootstrap."""
    rng = np.random.default_rng(seed)
    means = _mean_ratio(rng.choice(np.asarray(values), (RESAMPLES, len(values))))
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def _mean_ratio(ratios: Any) -> Any:
    """Geometric mean of each row, of which stalls are cut off."""
    stalled = np.log(STALLED)
    return np.exp(np.clip(np.log(ratios), -stalled, stalled).mean(axis=1))


def _shares(figures: Mapping[str, float]) -> dict[str, str]:
    return {name: f"{value:.2%}" for name, value in figures.items() if name.endswith("_share")}


def _draw(figures: Mapping[str, float], path: Path) -> None:
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    steps, saves, memory = figure.subplots(1, 3)
    names = CONTENDERS[1:]
    shares = [100 * figures[f"{name}_step_share"] for name in names]
    edges = [
        [
            abs(100 * figures[f"{name}_step_share_{edge}"] - share)
            for name, share in zip(names, shares, strict=True)
        ]
        for edge in ("low", "high")
    ]
    steps.bar(names, shares, yerr=edges, capsize=4, color="tab:blue")
    for name, limit in LIMITS.items():
        at = names.index(name)
        steps.plot([at - 0.4, at + 0.4], [100 * limit] * 2, color="tab:red")
    steps.axhline(0, color="black", linewidth=0.8)
    steps.set(title="longer step (line: limit)", ylabel="% of a step")
    _bars(saves, "choosing rows, once a save", "ms", [1000 * figures[f"{name}_choose_s"] for name in SCHEMES])
    _bars(memory, "memory", "bytes a row", [figures[f"{name}_bytes_per_row"] for name in SCHEMES])
    figure.savefig(path, dpi=150)


def _bars(axes: Any, title: str, unit: str, values: Sequence[float]) -> None:
    bars = axes.bar(SCHEMES, values, color="tab:blue")
    axes.bar_label(bars, fmt="%.3g")
    axes.set(title=title, ylabel=unit, yscale="log")
