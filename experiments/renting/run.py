"""How well short runs say how many workers to rent: `python -m experiments.renting [--quick]`.

What `cpr plan --workers` predicts from few runs, compared with what it was not fitted to. The command takes
root: workers are in network namespaces, and control groups give each 0.4 of a core, so that four have no less
each than one; other processes train alone on what fewer than four leave. An interrupted command continues
with the next row. Figures are medians over rounds or seeds, with `..._low` and `..._high`, the extremes:

- `scavenger_time_error`, `scavenger_time_error_throttled`: largest relative error of a step's predicted time
  among the cells of the grid that the model was not fitted to, with links as fast as this machine can and
  with links of 0.5 Gb/s. DLRM of the recipe `kaggle` with 26 tables of 10,000 rows, in fp32, without a
  pipeline; 1, 2 and 4 workers with batches of 512 to 2048, so that a worker's samples span a factor of 16.
  A time is the median of four passes of a round, in each of which all cells are timed. The model is fitted
  to the four corners of the grid, in each round and for each link. With `_mean` after `error`: the mean of
  the same errors.
- `scavenger_time_scatter`, `..._throttled`: how well those times can be known here: the largest relative
  difference of such a cell's time in a round from the median of the other rounds.
- `scavenger_time_error_other_link`: the same of throttled cells of several workers, predicted from corners
  whose links were not limited, with the measured speed of the throttled links.
- `scavenger_noise_error`: largest relative error of the gradient noise scale of linear regression, which is
  known in closed form, in three cases of workers, batch and noise; over 1,000 steps.
- `scavenger_regret`: time or money that the cell with the least predicted time or money takes more than the
  best of all cells, as a share; the largest of both and of both links, by round and seed. Samples to the
  target are measured: runs of the recipe `tiny` with every batch and the recipe's learning rates, evaluated
  on a day of their own, on average over seeds; the target is the log loss that the largest batch reaches in
  three quarters of its samples. The prediction has them from one seed's runs of the smallest and the largest
  batch. Failures and saves, which the same formulas would add to both sides, are left out.
- `scavenger_samples_error`: largest relative error of samples to the target, among batches in between.
- `scavenger_regret_noise`, `scavenger_samples_error_noise`: the same from a run of the smallest batch alone,
  by the gradient noise scale of the dense parameters.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Final

from data.synthetic import SyntheticConfig
from dlrm.telemetry.scaling import WINDOW
from experiments.harness import samples
from experiments.harness.command import experiment_parser, require_links
from experiments.harness.launch import ROOT
from experiments.harness.network import leave_tidily
from experiments.harness.processor_limits import NoControlGroupError, groups
from experiments.harness.record import QUICK, Record
from experiments.renting import linear, quality, times
from experiments.renting.figures import figures_of
from experiments.renting.picture import draw
from experiments.renting.times import Grid

PERIOD_US: Final = 5_000
"""Of the limits of processor time: short against a step."""


DATA: Final = SyntheticConfig(days=13, rows_per_day=20_000)


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured."""

    grid: Grid = field(default_factory=Grid)
    data: SyntheticConfig = DATA
    """Of the learning curves; the last day is evaluated."""
    seeds: int = 9
    """Of the learning curves, and of linear regression."""
    evaluated_every: int = 12_288
    """Samples from one evaluation to the next."""
    noise_steps: int = 2 * WINDOW

    @property
    def trained_samples(self) -> int:
        """Samples of a learning curve."""
        return (self.data.days - 1) * self.data.rows_per_day


SMALL: Final = Effort(
    grid=Grid(workers=(1, 2), batches=(64, 128, 256), rounds=1, passes=2, seconds=0.1, rows=100),
    data=SyntheticConfig(days=2, rows_per_day=4_000),
    seeds=1,
    evaluated_every=1024,
    noise_steps=20,
)
"""Of `--quick`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__, rounds=Grid.rounds, figures=True)
    options = parser.parse_args(arguments)
    effort = SMALL if options.quick else Effort(grid=Grid(rounds=options.rounds))
    record = Record("renting", asdict(effort), seeds=list(range(effort.seeds)), quick=options.quick)
    if options.figures:
        record.keep_all()
    else:
        require_links(parser)
        leave_tidily()
        try:
            _measure(
                record, effort, QUICK / "renting-data" if options.quick else ROOT / "datasets" / "renting"
            )
        except NoControlGroupError as error:
            parser.exit(1, f"{parser.prog}: {error}\n")
    figures, notes = figures_of(record.rows, effort.grid)
    return record.publish(figures, draw, notes)


def _measure(record: Record, effort: Effort, folder: Path) -> None:
    """Measure all rows that are not there; the data set is generated in `folder` if it is absent."""
    for seed in range(effort.seeds):
        for case in linear.CASES:
            key = f"linear {case.name} {seed}"
            record.measure(key, partial(linear.measure, case, seed, effort.noise_steps))
    dataset = samples.generated(effort.data, folder)
    for seed in range(effort.seeds):
        for batch in effort.grid.batches:
            curve = partial(
                quality.measure, dataset, batch, seed, effort.trained_samples, effort.evaluated_every
            )
            row = record.measure(f"curve {batch} {seed}", curve)
            print(f"{row['key']}: {quality.METRIC} {row['curve'][-1][1]:.4f}", flush=True)
    with groups(max(effort.grid.workers), PERIOD_US) as of_workers:
        for number in range(effort.grid.rounds):
            for turn, workers in product(range(effort.grid.passes), effort.grid.workers):
                timed = partial(times.measure, effort.grid, number, turn, workers, of_workers)
                row = record.measure(f"time {number} {turn} {workers}", timed)
                took = ", ".join(f"{1000 * each:.0f} ms" for each in row["free"].values())
                print(f"{row['key']}: {took}", flush=True)
