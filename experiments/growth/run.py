"""What grows as the work grows: `python -m experiments.growth [--quick]`.

A DLRM of the recipe `terabyte`, row-wise Adagrad, in fp32, on workers that share two cores. Each
axis changes one size of a job: `rows` (all tables together), `tables`, `columns`, global `batch`, `ids` a
sample, `ranks`, and `days` of data. At each point the same training runs under torchrun once with
`cpr.PartialRecovery` and once with full saves and loads by `torch.distributed.checkpoint` (DCP): a start,
steps, a save during training, kill -9 of a worker; with CPR also a row save of 1/8 of the rows, a lost node
(kill -9 with the worker's shared memory), and a start from the save. An interrupted command continues where
it stopped. Figures:

- `growth_exponent_METRIC_AXIS`: exponent of a power law through the points, with `..._low` and `..._high`,
  the least and greatest between neighbouring points; `growth_exponent_rival_METRIC_AXIS`: of DCP's. Metrics
  are seconds: `start`, from torchrun to the first step of all ranks; `build`, of the model with its initial
  values in it; `plan`, TorchRec's planner; `step`; `track`, MFU's counting in a step; `save_wait`, that
  training waits for a save in all; `save`, from its start to its commit; `row_save`, the same; `load`, of
  everything; `kill` and `node`, from the kill to the next step of all ranks; `first_batch` and `next_batch`,
  from the opening of the data to its first batch, and to one half way. And in bytes `memory`: sum over the
  processes of their peaks, saves included, less the tables with their optimizer state.

Of the largest job, medians over rounds in which both take turns, with `..._low` and `..._high`, the extremes:

- `big_rows`, `big_gb`: rows, and gigabytes of tables with their optimizer state.
- `big_kill_to_step_s`, `big_rival_kill_to_step_s`, `big_kill_ratio`: from the kill to the next step, and
  CPR's over DCP's. DCP's files are in the page cache from writing. `big_node_ratio`: a lost node over DCP's
  restart. `big_start_ratio`: the first start over that with DCP.
- `big_build_s`: of the model with its initial values. `big_build_ratio`: that over the time in which as many
  processes write the tables' bytes once into new shared memory.
- `big_ratio_to_torchrec`: samples/s of this trainer in fp32, in its faster setting of each round, over those
  of TorchRec's own DLRM in its fastest (one process with two threads or two with one; its pipeline).
- `big_step_ratio`: a step under CPR, whose tables are in shared memory, over one of the same model without.
- `big_save_gb_per_s`: of a rolling save during training, from its start to its commit.
- `big_memory_overhead`: peak of CPR's processes less that of TorchRec's before any save, over the tables.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final

from experiments.growth.axes import (
    AXES,
    BASE,
    BIG,
    BIG_SETTINGS,
    BIG_WORKLOAD,
    NUM_TABLES,
    Point,
    rows_points,
)
from experiments.growth.days import measure_days
from experiments.growth.figures import figures_of
from experiments.growth.measure import measure
from experiments.growth.picture import draw
from experiments.harness.command import experiment_parser
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.workload import Setting
from experiments.throughput.run import launch

DAYS: Final[Sequence[int]] = (1, 4, 16)
ROUNDS: Final = 3
SCRATCH: Final = Path("runs") / "growth"
"""Checkpoints, up to 19 GB, under the current folder; deleted after each measurement."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, rounds=ROUNDS).parse_args(arguments)
    points, big, days, rounds = AXES, BIG, DAYS, options.rounds
    if options.quick:
        small = replace(BASE, steps_before=2, global_batch_size=64)
        points = [replace(each, job=replace(small, rows=each.job.rows)) for each in rows_points([100, 400])]
        big, days, rounds = replace(points[-1], value=NUM_TABLES * 400), DAYS[:2], 0
    config = {"points": [asdict(point) for point in [*points, big]], "days": days, "rounds": rounds}
    record = Record("growth", config, seeds=[BASE.seed], quick=options.quick)
    scratch = QUICK / "growth" if options.quick else SCRATCH
    planned: list[tuple[str, Point, int]] = [
        (f"big, round {number}", big, number) for number in range(rounds)
    ]
    planned += [(point.key, point, number) for number, point in enumerate(points)]
    for key, point, order in planned:
        record.measure(key, partial(measure, point, scratch, order))
        print(f"{key}: stored", flush=True)
    for number in range(rounds):
        for setting in BIG_SETTINGS[:: -1 if number % 2 else 1]:
            key = f"step, round {number}: {setting.name}"
            record.measure(key, partial(_big_step, number, setting))
            print(f"{key}: stored", flush=True)
    for number in days:
        record.measure(f"days {number}", partial(measure_days, number, scratch))
        print(f"days {number}: stored", flush=True)
    return record.publish(figures_of(record.rows), draw)


def _big_step(number: int, setting: Setting) -> Row:
    return {"round": number, "setting": setting.name, **launch(setting, BIG_WORKLOAD)}
