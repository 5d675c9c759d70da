"""How fast training continues after a worker is killed: `python -m experiments.recovery [--quick]`.

Two and four workers train 26 tables of 64 columns, 2.6 GB with the state of row-wise Adagrad. One is killed
with -9 at a seeded random moment; the clock runs until every worker has done a new training step. The
baseline is plain torchrun with a full reload from `torch.distributed.checkpoint`, whose files are in the page
cache from writing; both take turns. Interrupted, the command resumes where it stopped. Figures:

- `time_ratio_2`, `time_ratio_4`: our time over the baseline's, median over rounds of the ratio within a
  round, with `..._low` and `..._high`, the extremes. `seconds_2`, `rival_seconds_2` and so on: medians of the
  times.

That nothing is lost, bit for bit, is not measured but tested (`tests/system/recovery`), and counted in a long
run by `experiments.recovery_soak`.
"""

import random
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.figure import Figure

from experiments.checkpointing.job import TrainingJob
from experiments.harness.command import experiment_parser
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.statistics import median_figures
from experiments.recovery.picture import phase_bars
from experiments.recovery.timing import CONTENDERS, saved_in, timed_run

ROUNDS: Final = 5
WORLD_SIZES: Final[tuple[int, ...]] = (2, 4)
SEED: Final = 1
TRAINING_S: Final = (3.0, 5.0)
"""The kill comes at a seeded random time in this range after the first step of all ranks."""
SCRATCH: Final = Path("runs") / "recovery"
"""Checkpoints, up to 6 GB, under the current folder; deleted at the end."""
NAMES: Final = {"rival": "torchrun,\nfull reload with DCP", "ours": "CPR,\npartial recovery"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    job, sizes, rounds = TrainingJob(), WORLD_SIZES, options.rounds
    if options.quick:
        job, sizes, rounds = TrainingJob(rows=4000, global_batch_size=256), WORLD_SIZES[:1], 1
    config = asdict(job) | {"world_sizes": sizes, "rounds": rounds}
    record = Record("recovery", config, seeds=[SEED], quick=options.quick)
    scratch = QUICK / "recovery" if options.quick else SCRATCH
    try:
        for size in sizes:
            for number in range(rounds):
                record.measure(
                    f"{size} workers, round {number}", partial(measure_round, number, job, size, scratch)
                )
                print(f"{size} workers, round {number}: stored", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return record.publish(figures_of(record.rows), draw)


def measure_round(number: int, job: TrainingJob, world_size: int, scratch: Path) -> Row:
    """Seconds of each phase of one restart of each contender; they take turns in coming first."""
    if not saved_in(scratch, "rival", world_size).exists():
        with timed_run("rival", job, world_size, scratch, measures=True) as run:
            run.wait_for("measured")
    took = {}
    for name in list(CONTENDERS)[:: -1 if number % 2 else 1]:
        rng = random.Random(f"{SEED} {number} {world_size}")  # the same for both contenders
        victim, trains_s = rng.randrange(world_size), rng.uniform(*TRAINING_S)
        with timed_run(name, job, world_size, scratch, measures=False) as run:
            run.wait_for("stepped")
            time.sleep(trains_s)
            took[name] = run.kill(victim)
    return {"round": number, "world_size": world_size, "phases": took}


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """Ratios and times for each number of workers that was measured."""
    figures: dict[str, float] = {}
    for size in sorted({row["world_size"] for row in rows}):
        rounds = [row["phases"] for row in rows if row["world_size"] == size]
        ours = [sum(each["ours"].values()) for each in rounds]
        rival = [sum(each["rival"].values()) for each in rounds]
        ratios = [mine / theirs for mine, theirs in zip(ours, rival, strict=True)]
        figures |= median_figures(f"time_ratio_{size}", ratios)
        figures |= {f"seconds_{size}": median(ours), f"rival_seconds_{size}": median(rival)}
    return figures


def draw(result: Row, folder: Path) -> None:
    """Draw one bar for each contender and number of workers."""
    sizes = sorted({row["world_size"] for row in result["rows"]})
    bars = [(size, name) for size in sizes for name in NAMES]
    figure = Figure(figsize=(9, 1.6 + 0.75 * len(bars)), layout="constrained")
    axes = figure.subplots()
    rounds = {
        f"{size} workers: {NAMES[name]}": [
            row["phases"][name] for row in result["rows"] if row["world_size"] == size
        ]
        for size, name in bars
    }
    phase_bars(axes, rounds)
    axes.set_xlabel("seconds from kill -9 of one worker to the next step of all (bars: the median round)")
    figure.suptitle("How fast training continues after a worker is killed", fontsize=11)
    figure.legend(fontsize=8, ncols=4, loc="outside lower center", frameon=False)
    figure.savefig(folder / "recovery.png", dpi=110)
