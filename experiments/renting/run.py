"""How well short runs say how many workers to rent: `python -m experiments.renting [--quick]`.

What `cpr plan --workers` predicts from few runs, compared with what it was not fitted to. The command takes
root: workers are in network namespaces, and control groups give each 0.4 of a core, so that four have no less
each than one; other processes train alone on what fewer than four leave. An interrupted command continues
with the next row. Figures are medians over rounds or seeds, with `..._low` and `..._high`, the extremes:

- `scavenger_time_error`, `scavenger_time_error_throttled`: largest relative error of a step's predicted time
  among the cells of the grid that the model was not fitted to, with links as fast as this machine can and
  with links of 0.5 Gb/s. DLRM of the recipe `kaggle` with 26 tables of 10,000 rows, in fp32, without a
  pipeline; 1, 2 and 4 workers with batches of 512 to 2048, so that a worker's samples span a factor of 16.
  The model is fitted to the four corners of the grid, in each round and for each link. With `_mean` after
  `error`: the mean of the same errors.
- `scavenger_time_error_other_link`: the same of throttled cells of several workers, predicted from corners
  whose links were not limited, with the measured speed of the throttled links.
- `scavenger_noise_error`: largest relative error of the gradient noise scale of linear regression, which is
  known in closed form, in three cases of workers, batch and noise; a window of 1,000 steps.
- `scavenger_regret`: time or money that the cell with the least predicted time or money takes more than the
  best of all cells, as a share; the largest of both and of both links. Samples to the target are measured:
  runs of the recipe `tiny` with every batch and the recipe's learning rates, evaluated on a day of their
  own; the target is the log loss that the largest batch reaches in three quarters of its samples. The
  prediction has them from runs of the smallest and the largest batch. Failures and saves, which the same
  formulas would add to both sides, are left out.
- `scavenger_samples_error`: largest relative error of samples to the target, among batches in between.
- `scavenger_regret_noise`, `scavenger_samples_error_noise`: the same from a run of the smallest batch alone,
  by the gradient noise scale of the dense parameters.
"""

from collections.abc import Sequence
from functools import partial
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
SEEDS: Final = 3
"""Of learning curves."""
NOISE_SEEDS: Final = 5
DATA: Final = SyntheticConfig(days=9, rows_per_day=40_000)
EVALUATED_EVERY: Final = 16_384
"""Samples."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__, rounds=Grid.rounds)
    options = parser.parse_args(arguments)
    require_links(parser)
    leave_tidily()
    grid, data, seeds, noise_seeds, steps = (
        Grid(rounds=options.rounds),
        DATA,
        SEEDS,
        NOISE_SEEDS,
        WINDOW,
    )
    every = EVALUATED_EVERY
    if options.quick:
        grid = Grid(workers=(1, 2), batches=(64, 128, 256), rounds=1, seconds=0.1, rows=100)
        data, seeds, noise_seeds, steps = SyntheticConfig(days=2, rows_per_day=4_000), 1, 1, 20
        every = 1024
    trained = (data.days - 1) * data.rows_per_day
    config = {
        "grid": times.config_of(grid),
        "trained_samples": trained,
        "evaluated_samples": data.rows_per_day,
        "evaluated_every": every,
        "seeds": seeds,
        "noise_seeds": noise_seeds,
        "noise_steps": steps,
    }
    record = Record("renting", config, seeds=list(range(max(seeds, noise_seeds))), quick=options.quick)
    for seed in range(noise_seeds):
        for case in linear.CASES:
            record.measure(f"linear {case.name} {seed}", partial(linear.measure, case, seed, steps))
    folder = QUICK / "renting-data" if options.quick else ROOT / "datasets" / "renting"
    dataset = samples.generated(data, folder)
    quality.measure(record, dataset, grid.batches, seeds, trained, every)
    try:
        with groups(max(grid.workers), PERIOD_US) as of_ranks:
            times.measure(record, grid, of_ranks)
    except NoControlGroupError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    figures, notes = figures_of(record.rows, grid)
    return record.publish(figures, draw(grid), notes)
