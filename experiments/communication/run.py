"""What the ways to exchange dense gradients are worth: `python -m experiments.communication [--quick]`.

Workers in network namespaces, whose nodes have links of 1, 5, 10, 25 Gb/s and of any speed (two cores can
send about as much as 25 Gb/s): 2 and 4 workers, each a node of its own, and 4 in nodes of 2, which share a
link. 2 in one node would meet no link. Takes root. Interrupted, it goes on with the next cell.

First, the dense exchange's share of a step of whole models, the `tiny` and the `terabyte` recipe with tables
of at most 50,000 rows: what is gained at most. Figures `dense_share_MODEL_WORKERS_LINK`, with `..._low` and
`..._high`: 1 minus the time of a step that exchanges nothing but scalars over that of one that also sums all
gradients; `dense_share_wide_...` of the dense part alone, under DDP.

Steps: the dense parts of the recipes (`mlperf`, DCN-v2, with a global batch of 128), and `wide`, that of
`terabyte` with 52 million parameters (four layers of 4096 on top, global batch 128). In each cell, `auto`
first trains until it has decided, and is then what it chose. Everybody in
`experiments.communication.contenders` takes turns of a few steps in the same processes, in a new order each
round; the first step of a turn does not count, but for large models. After the first rounds, of all, only
those go on that may be about as fast as the best, and DDP; after 12, `auto` and those comparable with it,
until the intervals of its ratios reach no more than 1 % from them, or time is up. The ratio of two
contenders is the median over the rounds that have both of their ratio in a round, with a 95 % interval
(bootstrap over rounds; fewer than 4 are refused). Memory and time do not allow all of it: `kaggle` and
`mlperf` were measured on 2 workers and links of 25 and 1 Gb/s, `wide` there and of 5 Gb/s, and on 4 workers
in nodes of 2 with links of 1 Gb/s; large models with fewer contenders. Controllers need whole trainings and
are there alone.

Comparable with `auto` is who leaves no more of a gradient behind than it may: all values, in whatever
encoding, or at least a share of 0.01 of them, with error feedback. A thousandth or a low rank (PowerSGD) are
in the table and in one figure alone: how much may be left behind is the user's choice (`comm.ratio`), and
only the way is `auto`'s.

- `auto_worst_ratio`: throughput of `auto` over the best comparable contender, in the cell where it is lowest,
  with `..._low` and `..._high`. Every other round says who is best, and those between compare, and the other
  way round; the ratios of both are pooled. So whoever won a round by luck does not win the next one by it.
  Where `auto` is what is best, the ratio is exactly 1.
- `auto_worst_ratio_whole_table`: the same over the best of all that exchange anything. Without a goal.
- `auto_best_share`: cells in which nothing comparable is clearly better (the interval reaches 1).
- `auto_lossless_share`: cells in which it chose to send all values in fp32;
  `auto_lossless_share_where_small`: of those in which the exchange is at most 3 % of DDP's step.
- `wide_1gbps_speedup`: of `auto` over DDP on `wide` at 1 Gb/s, in the layout where it is lowest, with
  `..._low` and `..._high`; each layout's own under `..._WORKERS`.
- `bytes_share_CONTENDER` (a point in its name becomes `_`, below as well): what leaves a node in a step,
  counted, over DDP's: `wide` on 2 workers.
- `table_vi_hits`: winners of Table VI of arXiv 2312.02493, of 36, that the formulas name.

Trainings: most of an epoch of the `tiny` recipe (768 steps) with a top MLP of 512, 256 and 1, of which
compressing is worth while, on 2 workers with links of 1 Gb/s, tested four times on the first samples of the
test day. All get the same samples in the same order, so that only the exchange differs; SelSync too, which
is meant for `data.order=seldp`. PowerSGD begins when `auto` plans. Against DDP's run of the same seed:

- `auc_delta_CONTENDER`, with `..._ci`: AUC after equal samples minus DDP's, mean over seeds and half its 95 %
  interval. Three seeds tell a difference from 0 if it is 2.5 times its standard deviation from seed to seed,
  and no smaller one. More than 0 is no merit of sending less: so short a training, at the recipe's learning
  rate, has not converged, and gradients that are sent late and summed change the steps that Adagrad makes.
- `time_to_auc_speedup_CONTENDER`, with `..._ci`: how many times sooner it reaches the AUC that DDP has after
  three quarters of the samples; planning and trying count.
- `auto_decided_at_step`: the first step that `auto` made as decided, the latest of all seeds; what it changed
  later is in the notes.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from time import monotonic
from typing import Final

from experiments.communication.contenders import BASELINE
from experiments.communication.figures import (
    Layout,
    cells_of,
    figures_of,
    notes_of,
    share_of,
    trainings_of,
)
from experiments.communication.picture import draw_steps, draw_trainings
from experiments.communication.tasks import (
    QUICK,
    TRAINED_GBIT_PER_S,
    TRAINED_LAYOUT,
    Scope,
    Task,
    tasks,
)
from experiments.harness.network import Network, NoNetworkError, check_possible
from experiments.harness.record import Record, Row
from experiments.harness.workers import Workers
from experiments.precision import default_dataset
from experiments.splitting.figures import link_name

WORKER: Final = "experiments.communication.worker"
CORES: Final = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its pictures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a small run, which overwrites no stored result")
    quick = parser.parse_args(arguments).quick
    scope = QUICK if quick else Scope()
    try:
        check_possible()
    except NoNetworkError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    record = Record("communication", asdict(scope), seeds=scope.seeds, quick=quick)
    dataset = str(default_dataset(quick))
    progress = Progress(sum(1 for layout in scope.layouts for _ in tasks(scope, layout)))
    for layout in scope.layouts:
        _measure(record, list(tasks(scope, layout)), scope, layout, dataset, progress)
    figures, cells, trainings = figures_of(record.rows), cells_of(record.rows), trainings_of(record.rows)
    path = record.finish(figures, notes_of(cells, trainings, figures))
    draw_steps(cells, path.with_name("communication.png"))
    title = f"{TRAINED_LAYOUT}, {link_name(TRAINED_GBIT_PER_S)}"
    draw_trainings(trainings, figures, title, path.with_name("communication_training.png"))
    print(f"{figures}\nstored in {path}")
    return 0


class Progress:
    """Tells how far it is, and roughly how long it will take.

    Args:
        total: rows.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._measured = total, 0, 0
        self._began = monotonic()

    def skip(self) -> None:
        """A row was there already."""
        self._done += 1

    def tell(self, row: Row) -> None:
        """A row was measured."""
        self._done += 1
        self._measured += 1
        left = (monotonic() - self._began) / self._measured * (self._total - self._done)
        print(f"[{self._done}/{self._total}, about {left / 60:.0f} min left] {told(row)}", flush=True)


def told(row: Row) -> str:
    """A row in a line."""
    if "curve" in row:
        last = row["curve"][-1]
        return f"{row['key']}: AUC {last['auc']:.5f} in {last['seconds']:.1f} s"
    if "share_of" in row:
        return f"{row['key']}: the dense exchange is {share_of(row).value:.1%} of the step"
    (cell,) = cells_of([row])
    ratio = cell.auto_ratio
    return (
        f"{cell.name}: auto is {cell.chosen}, {cell.ratio(cell.chosen, BASELINE).value:.2f} x DDP, "
        f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}) of {cell.best}; {len(cell.rounds)} rounds"
    )


def _measure(
    record: Record,
    wanted: Sequence[Task],
    scope: Scope,
    layout: Layout,
    dataset: str,
    progress: Progress,
) -> None:
    """All rows of a layout that are not there yet, in one launch."""
    stored = {row["key"] for row in record.rows}
    missing = [task for task in wanted if task.key not in stored]
    for _ in range(len(wanted) - len(missing)):
        progress.skip()
    if not missing:
        return
    job = {"trainings": {**scope.trainings, "dataset": dataset}}
    threads = max(1, CORES // layout.workers)
    with ExitStack() as stack:
        network = stack.enter_context(Network(layout.workers, layout.per_node))
        running = stack.enter_context(Workers(network, WORKER, job, threads))
        for task in missing:
            row = record.measure(task.key, partial(_ask, running, network, task))
            progress.tell(row)


def _ask(running: Workers, network: Network, task: Task) -> Row:
    if task.preparation is not None:
        network.limit(None)
        running.ask(**task.preparation)
    network.limit(task.gbit_per_s)
    row = dict(task.told)
    for request in task.requests:
        row |= running.ask(**request)
    return row
