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

import shutil
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from experiments.checkpointing.job import Job
from experiments.harness.command import experiment_parser
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.statistics import median_figures
from experiments.recovery.picture import draw
from experiments.recovery.timing import Timing

ROUNDS: Final = 5
WORLD_SIZES: Final[tuple[int, ...]] = (2, 4)
SEED: Final = 1
SCRATCH: Final = Path("runs") / "recovery"
"""Checkpoints, up to 6 GB, under the current folder; deleted at the end."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    job, sizes, rounds = Job(), WORLD_SIZES, options.rounds
    if options.quick:
        job, sizes, rounds = Job(rows=4000, global_batch_size=256), WORLD_SIZES[:1], 1
    config = asdict(job) | {"world_sizes": sizes, "rounds": rounds}
    record = Record("recovery", config, seeds=[SEED], quick=options.quick)
    scratch = QUICK / "recovery" if options.quick else SCRATCH
    timing = Timing(job, scratch, SEED)
    try:
        for size in sizes:
            for number in range(rounds):
                record.measure(f"{size} workers, round {number}", partial(timing.round, number, size))
                print(f"{size} workers, round {number}: stored", flush=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return record.publish(figures_of(record.rows), draw)


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
