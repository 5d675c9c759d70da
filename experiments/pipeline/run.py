"""What the schedules of a training step gain: `python -m experiments.pipeline [--quick]`.

Two or four workers, each in a network namespace of its own with a link of 1, 5 or 25 Gb/s or unthrottled,
train in mixed precision on two cores that they share: the recipes `terabyte` (tables of at most 100,000 rows,
batch 2048), `tiny`, `dcnv2` and, with operator splitting (`sharding.strategy=des`), `deepfm` (tables of at
most 3,000 rows, batch 1024). The command requires root. In each cell the schedules of `train.pipeline` take
turns on the same batches in the same processes, in a new random order every round; a turn begins with steps
that are not timed. Each cell is a row of the result; an interrupted command continues with the next.

Schedules: `none`, `ids` and `prefetch` (exact), `waves` (two half batches, exact but for rounding) and
`tick_tock` (the same with each gradient used twice), both not with operator splitting, `delayed` (rows and
dense gradients one step late) and `delayed_dense` (dense gradients alone, with
`train.late_rows=corrected`). `auto` chooses before the rounds.

Figures of times end in `1gbps`, `5gbps`, `25gbps` or `unthrottled`, after `_SHAPE`
unless that is `terabyte` and `_4_workers` unless there are 2, e.g. `prefetch_speedup_1gbps`,
`prefetch_speedup_tiny_4_workers_25gbps`. Each is a median over rounds of the value within a round, with
`..._low` and `..._high`, its 95 % interval (bootstrap over rounds):

- `step_s`: of a step under `none`.
- `ids_share`, `forward_share`, `backward_share`, `dense_share`: share of such a step that the main thread
  spends in an exchange or waits for it: that of ids, of pooled embeddings (or partial results of split
  operators), of their gradients, and of dense gradients. Mean of the ranks; waiting for a slower rank counts.
  What is left is computation; it has the gradients of replicated tables in it, which
  DistributedDataParallel averages unseen.
- `hideable_share`: of a step under `none`, the time that exact prefetching could hide at most: ids' and
  forward exchange, but no longer than the computation.
- `hideable_formula_share`: the same by formula, without an interval: bytes of the rank that sends most over
  the speed of the link, and for each collective the latency of an empty one, measured in the cell. Bytes take
  no time on unthrottled links.
- `SCHEDULE_speedup`: throughput over that of `none`.
- `prefetch_hidden_share`: (step under `none` - step under `prefetch`) / the hideable time under `none` of the
  same round. Below 0 if prefetching costs more than it hides; above 1 if it saves more than the hideable
  time, such as waiting of ranks for each other. Only in cells in which at least 5 % of a step can be hidden.
- `waves_hidden_share`: the same of `waves`, over the ids', forward and backward exchange.
- `SCHEDULE_cpu_ratio`, `SCHEDULE_bytes_ratio`: processor time of a step, and bytes that leave a node, over
  those of `none`; medians, without an interval.

The same names without a cell, `SCHEDULE_speedup`, `prefetch_hidden_share` and `waves_hidden_share`, are
medians over all cells of the cells' values, with the extremes under `..._low` and `..._high`. With the
interval of the cell that notes name:

- `SCHEDULE_worst_ratio`: least speed-up of all cells.
- `auto_worst_ratio`: least throughput of what `auto` chooses in a cell, on its first batches, over the
  fastest exact schedule (`none`, `ids`, `prefetch`, `waves`): every other round selects that one and the
  others compare, and the other way round. Exactly 1 where `auto` chose it.

`auto_ids_share` and `auto_prefetch_share` are the shares of the cells in which `auto` chose these.

`peak_bytes_SCHEDULE`: largest resident set of a worker that trains `terabyte` under this schedule alone, 2
workers.

AUC (`experiments.pipeline.quality`): `prefetch_auc_delta`, `waves_auc_delta`, `tick_tock_auc_delta`,
`delayed_auc_delta`, `delayed_dense_auc_delta` and `delayed_predicted_auc_delta` (`train.late_rows`),
`delayed_spike_auc_delta` and those of the other compensations: AUC minus that under `none` after the same
batches, mean over seeds, with `..._ci`, half its 95 % interval (Student's t), `..._low` and `..._high`, the
extremes of the seeds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from time import monotonic
from typing import Final

from experiments.harness.command import experiment_parser, require_links
from experiments.harness.network import Network, leave_tidily
from experiments.harness.record import Record, Row
from experiments.harness.samples import default_dataset, identity_of
from experiments.harness.workers import Measurements, Workers, measure_missing
from experiments.pipeline import quality
from experiments.pipeline.figures import Cell, figures_of
from experiments.pipeline.picture import draw
from experiments.pipeline.schedules import NONE, SCHEDULES
from experiments.pipeline.shapes import SHAPES, Shape

WORKER: Final = "experiments.pipeline.worker"
MEMORY_SHAPE: Final = "terabyte"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What is measured, and for how long."""

    shapes: Mapping[str, Shape]
    workers: Sequence[int]
    links_gbit_per_s: Sequence[float | None]
    """None: not limited."""
    rounds: tuple[int, int]
    """Least and most rounds of a cell."""
    cell_s: float
    """Time after which a cell ends once it has the least rounds."""
    peaks: Sequence[str]
    """Schedules whose memory is measured."""
    quality: quality.Effort


FULL: Final = Effort(
    shapes=SHAPES,
    workers=(2, 4),
    links_gbit_per_s=(1.0, 5.0, 25.0, None),
    rounds=(7, 24),
    cell_s=24.0,
    peaks=tuple(SCHEDULES),
    quality=quality.FULL,
)
QUICK: Final = Effort(
    shapes={"terabyte": Shape(recipe="terabyte", max_rows=500, global_batch_size=64, num_batches=3, steps=2)},
    workers=(2,),
    links_gbit_per_s=(1.0,),
    rounds=(3, 3),
    cell_s=0.0,
    peaks=(NONE,),
    quality=quality.QUICK,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__)
    quick = parser.parse_args(arguments).quick
    require_links(parser)
    leave_tidily()
    effort = QUICK if quick else FULL
    dataset = default_dataset(quick)
    config = asdict(effort) | {
        "schedules": SCHEDULES,
        "contenders": quality.SCHEDULES,
        "dataset": identity_of(str(dataset)),
    }
    record = Record("pipeline", config, effort.quality.seeds, quick=quick)
    for name, shape in effort.shapes.items():
        for workers in effort.workers:
            cells = [Cell(shape=name, workers=workers, gbit_per_s=link) for link in effort.links_gbit_per_s]
            wanted = {str(cell): partial(_time, cell, effort) for cell in cells}
            _measure(record, wanted, workers, shape, shape.schedules)
    for name in effort.peaks:
        shape = effort.shapes[MEMORY_SHAPE]
        _measure(record, {f"memory {name}": partial(_peak, name)}, min(effort.workers), shape, [name])
    quality.measure(record, effort.quality, dataset)
    figures, notes = figures_of(record.rows)
    return record.publish(figures, draw, notes)


def _measure(
    record: Record, wanted: Measurements, workers: int, shape: Shape, schedules: Sequence[str]
) -> None:
    """Measure the missing rows of a shape in one launch of workers that have these schedules."""
    job = {"shape": asdict(shape), "schedules": list(schedules)}
    for row in measure_missing(record, wanted, Network(workers), WORKER, job):
        print(f"{row['key']}: stored", flush=True)


def _time(cell: Cell, effort: Effort, workers: Workers, network: Network) -> Row:
    network.limit(cell.gbit_per_s)
    row = {**asdict(cell), **workers.ask(do="choose"), **workers.ask(do="exchanges")}
    orders, began_s = Random(str(cell)), monotonic()
    rounds: list[Row] = []
    least, most = effort.rounds
    names = effort.shapes[cell.shape].schedules
    while len(rounds) < least or (len(rounds) < most and monotonic() - began_s < effort.cell_s):
        rounds.append(workers.ask(do="round", order=orders.sample(names, len(names))))
    took_ms = ", ".join(f"{name} {1000 * found['step_s']:.1f}" for name, found in rounds[-1].items())
    chose = f"{len(rounds)} rounds, auto chose {row['chosen']}"
    print(f"{cell}: {chose}; the last round in ms a step: {took_ms}", flush=True)
    return row | {"rounds": rounds}


def _peak(schedule: str, workers: Workers, _: Network) -> Row:
    return {"schedule": schedule, **workers.ask(do="memory")}
