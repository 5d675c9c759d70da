"""What grows as the work grows: `python -m experiments.growth [--quick]`.

A DLRM of the recipe `terabyte`, row-wise Adagrad, in fp32, on workers that share two cores. Each
axis changes one size of a job: `rows` (all tables together), `tables`, `columns`, global `batch`, `ids` a
sample, `ranks`, and `days` of data. At each point the same training runs under torchrun once with
`cpr.PartialRecovery` and once with full saves and loads by `torch.distributed.checkpoint` (DCP): a start,
steps, a save during training, kill -9 of a worker; with CPR also a row save of 1/8 of the rows, a lost node
(kill -9 with the worker's shared memory), and a start from the save. An interrupted command continues where
it stopped, and with `--keep` after a commit, too. Figures:

- `growth_exponent_METRIC_AXIS`: exponent of a power law through the points, with `..._low` and `..._high`,
  the least and greatest between neighbouring points; `growth_exponent_rival_METRIC_AXIS`: of DCP's. Metrics
  are seconds: `start`, from torchrun to the first step of all ranks; `build`, of the model with its initial
  values in it; `plan`, TorchRec's planner; `step`; `track`, MFU's counting in a step; `save_wait`, that
  training waits for a save in all; `save`, from its start to its commit; `row_save`, the same; `load`, of
  everything; `kill` and `node`, from the kill to the next step of all ranks; `first_batch` and `next_batch`,
  from the opening of the data to its first batch, and to one half way. And in bytes `memory`: sum over the
  processes of their peaks, saves included, less the tables with their optimizer state.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Final

from experiments.growth.axes import AXES, BASE, rows_points
from experiments.growth.days import measure_days
from experiments.growth.figures import figures_of
from experiments.growth.measure import measure
from experiments.growth.picture import draw
from experiments.harness.command import experiment_parser
from experiments.harness.record import QUICK, Record

DAYS: Final[Sequence[int]] = (1, 4, 16)
SCRATCH: Final = Path("runs") / "growth"
"""Checkpoints, up to 19 GB, under the current folder; deleted after each measurement."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    options = experiment_parser(__doc__, keep=True).parse_args(arguments)
    points, days = AXES, DAYS
    if options.quick:
        small = replace(BASE, steps_before=2, global_batch_size=64)
        points = [replace(each, job=replace(small, rows=each.job.rows)) for each in rows_points([100, 400])]
        days = DAYS[:2]
    config = {"points": [asdict(point) for point in points], "days": days}
    record = Record("growth", config, seeds=[BASE.seed], quick=options.quick)
    if options.keep:
        record.keep(lambda _: True)
    scratch = QUICK / "growth" if options.quick else SCRATCH
    for number, point in enumerate(points):
        record.measure(point.key, partial(measure, point, scratch, number))
        print(f"{point.key}: stored", flush=True)
    for number in days:
        record.measure(f"days {number}", partial(measure_days, number, scratch))
        print(f"days {number}: stored", flush=True)
    return record.publish(figures_of(record.rows), draw)
