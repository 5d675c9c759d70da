"""What the ways to exchange dense gradients gain: `python -m experiments.communication [--quick]`.

Workers run in network namespaces, whose nodes have links of 1, 5, 10, 25 Gb/s and of unlimited speed (two
cores can send about 25 Gb/s): 2 and 4 workers, each a node of its own, and 4 in nodes of 2, which share a
link. The command requires root. An interrupted command continues with the next cell.

First, the dense exchange's share of a step of whole models, the `tiny` and the `terabyte` recipe with tables
of at most 50,000 rows, which is the most that can be gained. Figures `dense_share_MODEL_WORKERS_LINK`, with
`..._low` and `..._high`: 1 minus the time of a step that exchanges only scalars over that of one that also
sums all gradients; `dense_share_wide_...` of the dense part alone, under DDP.

Steps: the dense parts of the recipes (`mlperf`, DCN-v2, with a global batch of 128), and `wide`, that of
`terabyte` with 52 million parameters (four layers of 4096 on top, global batch 128). In each cell, `auto`
first trains until its choice is final, and that choice is timed. All contenders of
`experiments.communication.contenders` take turns of a few steps in the same processes, in a new order each
round; the first step of a turn does not count, except for large models. After the first rounds, only DDP and
contenders that may be about as fast as the best continue; after 12, only `auto` and those comparable with it,
until the intervals of its ratios reach at most 1 % from them, or the time limit. The ratio of two contenders
is the median, over the rounds with both, of their ratio within a round, with a 95 % interval (bootstrap over
rounds; at least 4). Memory and time do not allow everything: `kaggle` and `mlperf` were measured on 2 workers
and links of 25 and 1 Gb/s, `wide` there and with 5 Gb/s, and on 4 workers in nodes of 2 with links of 1 Gb/s;
large models with fewer contenders. Controllers need whole trainings and take part in those alone.

A contender is comparable with `auto` if it sends at least as much of a gradient as `auto` must: all values,
in any encoding, or a share of at least 0.01, with error feedback. A share of 0.001 and a low rank (PowerSGD)
are in the picture and in one figure alone, because the share is the user's decision (`comm.ratio`), and
`auto` decides only on the exchange.

- `auto_worst_ratio`: lowest throughput of `auto` over the best comparable contender in any cell, with
  `..._low` and `..._high`. Every other round selects the best and the rounds between compare, and the other
  way round; the ratios of both are pooled. A contender that is best by chance in one half thus gains nothing
  in the other. If `auto` chose the best, the ratio is exactly 1.
- `auto_worst_ratio_whole_table`: the same over the best of all contenders with an exchange. Without a goal.
- `auto_best_share`: share of cells in which no comparable contender is clearly better (the interval reaches
  1).
- `auto_lossless_share`: share of cells in which `auto` chose to send all values in fp32;
  `auto_lossless_share_where_small`: of the cells in which the exchange is at most 3 % of DDP's step.
- `wide_1gbps_speedup`: throughput of `auto` over DDP on `wide` at 1 Gb/s, in the layout with the lowest
  ratio, with `..._low` and `..._high`; for each layout under `..._WORKERS`.
- `bytes_share_CONTENDER` (with `_` for a point in its name, here and below): counted bytes that leave a node
  in a step over DDP's, for `wide` on 2 workers.
- `table_vi_hits`: number of the 36 fastest collectives in Table VI of arXiv 2312.02493 that the formulas
  name.

Trainings: most of an epoch of the `tiny` recipe (768 steps) with a top MLP of 512, 256 and 1, for which
compression can gain something, on 2 workers with links of 1 Gb/s, evaluated four times on the first samples
of the test day. All contenders get the same samples in the same order, so that only the exchange differs,
even SelSync, which is meant for `data.order=seldp`. PowerSGD starts when `auto` plans. Against DDP's run of
the same seed:

- `auc_delta_CONTENDER`, with `..._ci`: AUC after equal samples minus DDP's, mean over seeds and half its 95 %
  interval. With three seeds, a difference is significant if it is 2.5 times its standard deviation between
  seeds. A value above 0 is no merit of compression: so short a training, at the recipe's learning rate, has
  not converged, and delayed, accumulated gradients change the steps of Adagrad.
- `time_to_auc_speedup_CONTENDER`, with `..._ci`: speed-up to the AUC that DDP has after three quarters of the
  samples; planning and trials count.
- `auto_decided_at_step`: the first step with the decision of `auto`, the latest of all seeds; its later
  changes are in the notes.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from random import Random
from time import monotonic
from typing import Final

from experiments.communication.contenders import BASELINE, TRAINED, stepped
from experiments.communication.figures import (
    TRAINED_GBIT_PER_S,
    TRAINED_LAYOUT,
    NodeLayout,
    cells_of,
    figures_of,
    share_of,
)
from experiments.communication.models import MODELS
from experiments.communication.picture import draw
from experiments.harness.command import experiment_parser, require_links
from experiments.harness.network import Network
from experiments.harness.record import Record, Row
from experiments.harness.samples import default_dataset
from experiments.harness.turns import Effort
from experiments.harness.workers import Measurements, Workers, measure_missing
from experiments.splitting.figures import link_name

WORKER: Final = "experiments.communication.worker"
SHARE: Final = Effort(full_rounds=1, least_rounds=8, most_rounds=100, seconds=6.0, reach=0.005)
SMALL: Final = Effort(full_rounds=2, least_rounds=12, most_rounds=1000, seconds=60.0, reach=0.01)
LARGE: Final = Effort(full_rounds=1, least_rounds=12, most_rounds=200, seconds=80.0, reach=0.01)


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Models, layouts, speeds and trainings to measure."""

    layouts: tuple[NodeLayout, ...] = (
        NodeLayout(workers=2),
        NodeLayout(workers=4),
        NodeLayout(workers=4, per_node=2),
    )
    links_gbit_per_s: tuple[float | None, ...] = (None, 25.0, 10.0, 5.0, 1.0)
    """None: not limited."""
    models: tuple[str, ...] = ("tiny", "terabyte", "kaggle", "mlperf", "wide")
    """The one with the largest memory last."""
    shared: tuple[str, ...] = ("tiny", "terabyte")
    """Recipes for the dense exchange's share of a step."""
    share: Effort = SHARE
    small: Effort = SMALL
    large: Effort = LARGE
    """Effort for models so large that few contenders fit in memory."""
    trained: tuple[str, ...] = TRAINED
    seeds: tuple[int, ...] = (0, 1, 2)
    trainings: dict[str, int] = field(
        default_factory=lambda: {"steps": 768, "evaluations": 4, "test_batches": 48}
    )

    def links(self, model: str, layout: NodeLayout) -> list[float | None]:
        """Link speeds of the cells of a model."""
        few = MODELS[model].links_gbit_per_s
        if few is None:
            return list(self.links_gbit_per_s)
        return [
            link for link in self.links_gbit_per_s if link in few.get((layout.workers, layout.per_node), ())
        ]


QUICK: Final = Scope(
    layouts=(NodeLayout(workers=2),),
    links_gbit_per_s=(1.0,),
    models=("quick",),
    shared=("tiny",),
    share=Effort(full_rounds=1, least_rounds=4, most_rounds=4, seconds=0, reach=0),
    small=Effort(full_rounds=2, least_rounds=4, most_rounds=4, seconds=0, reach=0),
    trained=("ddp", "auto", "power_sgd"),
    seeds=(0, 1),
    trainings={"steps": 12, "evaluations": 2, "test_batches": 2},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its pictures."""
    parser = experiment_parser(__doc__)
    quick = parser.parse_args(arguments).quick
    scope = QUICK if quick else Scope()
    require_links(parser)
    record = Record("communication", asdict(scope), seeds=scope.seeds, quick=quick)
    dataset = str(default_dataset(quick))
    job = {"trainings": {**scope.trainings, "dataset": dataset}}
    wanted = {layout: measurements(scope, layout) for layout in scope.layouts}
    total, stored, began = sum(map(len, wanted.values())), len(record.rows), monotonic()
    for layout, of_layout in wanted.items():
        network = Network(layout.workers, layout.per_node)
        for row in measure_missing(record, of_layout, network, WORKER, job):
            done = len(record.rows)
            left_min = (monotonic() - began) / (done - stored) * (total - done) / 60
            print(f"[{done}/{total}, about {left_min:.0f} min left] {summary(row)}", flush=True)
    figures, notes = figures_of(record.rows)
    return record.publish(figures, draw, notes)


def measurements(scope: Scope, layout: NodeLayout) -> Measurements:
    """All rows of a layout, in the order in which they are measured: shares, trainings, steps."""
    found: dict[str, Callable[[Workers, Network], Row]] = {}
    if layout.per_node == 1:
        for recipe in scope.shared:
            for link in scope.links_gbit_per_s:
                request = {"do": "share", "recipe": recipe, "effort": asdict(scope.share)}
                fields = {"share_of": recipe, "workers": layout.workers, "gbit_per_s": link}
                found[f"share {recipe} {layout} {link_name(link)}"] = partial(_ask, request, link, fields)
    if layout == TRAINED_LAYOUT:
        for seed in scope.seeds:
            # a random order, so that no contender is always the first or the last
            for name in Random(seed).sample(scope.trained, len(scope.trained)):
                fields = {"contender": name, "seed": seed}
                found[f"train {name} seed {seed}"] = partial(
                    _ask, {"do": "train", **fields}, TRAINED_GBIT_PER_S, fields
                )
    for model in scope.models:
        for link in scope.links(model, layout):
            found[f"steps {model} {layout} {link_name(link)}"] = partial(
                _time_steps, scope, model, layout, link
            )
    return found


def _ask(request: Row, gbit_per_s: float | None, fields: Row, workers: Workers, network: Network) -> Row:
    network.limit(gbit_per_s)
    return fields | workers.ask(**request)


def _time_steps(
    scope: Scope, model: str, layout: NodeLayout, gbit_per_s: float | None, workers: Workers, network: Network
) -> Row:
    is_large = MODELS[model].is_large
    names = stepped(is_large=is_large, num_workers=layout.workers, per_node=layout.per_node)
    network.limit(None)
    workers.ask(do="build", model=model, contenders=names)
    network.limit(gbit_per_s)
    row = {
        "model": model,
        **asdict(layout),
        "gbit_per_s": gbit_per_s,
        **workers.ask(do="choose", is_final=scope is not QUICK),
    }
    return row | workers.ask(do="time", effort=asdict(scope.large if is_large else scope.small))


def summary(row: Row) -> str:
    """One line about a row."""
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
