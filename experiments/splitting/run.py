"""What operator splitting gains in bytes and time: `python -m experiments.splitting [--quick]`.

Operator splitting (DES) exchanges partial results of the first operators instead of embeddings. Five models
in shapes of the `terabyte` recipe (64 columns, SGD, fp32, global batch 2048; `MODELS` in
`experiments.splitting.workload` lists the differences: DeepFM with three layers of 400, DCN-v2 with three
cross layers of rank 64 and layers of 512 and 256) train on 2 and 4 workers. The command requires root,
because each worker runs in a network namespace with a link of its own, whose speed is limited. An interrupted
command continues with the next cell. `--keep-times` keeps the timed cells of the stored result and measures
all else again, in minutes.

Bytes that a rank sends in a step: embeddings, partial results and gradients, including those of an operator's
weights; for a parameter server also the 8-byte keys of the unique rows that it pulls. Bytes that are the same
under every plan do not count, nor, by the DES paper's convention, the ids of samples, which that paper reads
where their rows are. This project sends them under both plans: every id and every bag's length, 8 bytes each,
for each of a model's heads. Figures with `_with_ids` count these as well. The bytes of both plans are counted
on the wire on 2 and 4 workers and must equal the formulas. Formulas alone give those of 8 workers, of ids,
and of a parameter server, from the unique rows of the same batches; `tests/system/sharding/test_wire.py` and
`tests/experiments/splitting` compare them with counted bytes. Figures for 4 workers, with `..._2_workers` and
`..._8_workers`:

- `bytes_saved_lr`, `bytes_saved_fm`, `bytes_saved_deepfm`, `bytes_saved_dlrm`, `bytes_saved_dcn`: share of
  the parameter server's bytes that the better of splitting and exchanging saves, on multi-hot batches as in
  MLPerf's Criteo Terabyte (214 ids a sample). Below 0: it sends more.
- the same names with `_one_hot`: on batches with one id a feature, as Criteo has it.
- the same names with `_with_ids`, before `_one_hot`: with ids and lengths of both plans. All 214 ids of a
  multi-hot sample are sent for a linear part that reduces them to one number, which is more than a parameter
  server sends, because that sends each unique key once. A head split by columns (DLRM's) needs all ids on all
  ranks, so that exchanging may then be better.
- the same names with `_a2a`: against the all-to-all of pooled embeddings, without ids, of which both plans
  send equally many unless the split is by columns; 0 if the all-to-all is better.

The DES paper gives 72.26 % to 99.77 % less by theory, and up to 83 % measured (first version); its models'
shapes and batches are not known here.

Rounding: partial results exchanged in bf16 or fp16 (`sharding.wire_dtype`), on 2 workers, one step after the
initial values, against the same step in fp32; norm of the difference over the norm, of the worst model:

- `wire_error_bf16`, `wire_error_fp16`: of the gradients of the dense parameters that are replicated.
- the same names with `_logits`: of the logits.

Time: with one-hot batches, tables of at most 50,000 rows, and links of 1, 5 and 25 Gb/s and unthrottled
(about as fast as two cores can send). TorchRec's plan (`torchrec`, which replicates tables of at most 200
rows, as by default) and the split plan (`des`) take turns of a few steps in the same processes, in a random
order each round. `auto` chooses again for each speed; if it chooses neither plan but a mixture, it takes
turns with them. Ratios are medians over rounds of the ratio within a round, with a 95 % interval (bootstrap
over rounds). Rounds of a cell continue until all intervals reach at most 2.5 % from their ratios, or the time
limit:

- `planner_hits_share`: share of cells in which the plan that `auto` chose is the faster one, that is, the
  whole interval of its ratio to the other plan is above 1. A tie counts as a hit: its interval holds 1 and
  reaches at most 5 % from 1. A wider interval that holds 1 leaves the cell open, which is no hit.
  `ties_share` and `open_share` are their shares, and `planner_firm_hits_share` leaves the ties out. A mixture
  is compared with the better plan.
- `auto_worst_ratio`: lowest throughput of `auto` over the better plan in any cell, with `..._low` and
  `..._high`.
- `best_throughput_ratio`: highest throughput of `des` over `torchrec` in any cell, with its interval.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from math import isclose
from statistics import mean
from typing import Final

import numpy as np
from torch import nn

from dlrm.comm.consistency import NUM_FLAGS
from dlrm.launch.device import Ranks
from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.planning.savings import id_traffic_of, traffic_of
from dlrm.sharding.splitting.planning.shapes import heads_of, numbers_outside_tables
from dlrm.training.trainer import NUM_SCALARS
from experiments.harness.command import experiment_parser, require_links
from experiments.harness.network import Network
from experiments.harness.record import Record, Row
from experiments.harness.workers import Measurements, Workers, measure_missing
from experiments.splitting.figures import cells_of, figures_of, link_name
from experiments.splitting.picture import draw
from experiments.splitting.workload import BAGS, MODELS, TerabyteWorkload

FORMULA_WORKERS: Final = (2, 4, 8)
ERROR_WORKERS: Final = 2
"""Number of workers of the rounding errors."""
WORKER: Final = "experiments.splitting.worker"


@dataclass(frozen=True, kw_only=True)
class SplittingScope:
    """The cells to measure."""

    models: tuple[str, ...] = tuple(MODELS)
    workers: tuple[int, ...] = (2, 4)
    links_gbit_per_s: tuple[float | None, ...] = (1.0, 5.0, 25.0, None)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--keep-times", action="store_true", help="keep the times of the stored result")
    options = parser.parse_args(arguments)
    scope, workload = SplittingScope(), TerabyteWorkload()
    if options.quick:
        scope = SplittingScope(models=("lr", "dlrm"), workers=(2,), links_gbit_per_s=(1.0,))
        workload = TerabyteWorkload(
            max_rows=500, global_batch_size=64, num_batches=2, cell_s=0, rounds=(3, 3)
        )
    require_links(parser)
    circumstances = asdict(scope) | asdict(workload)
    record = Record("splitting", circumstances, seeds=[workload.seed], quick=options.quick)
    if options.keep_times:
        try:
            record.keep(lambda row: "rounds" in row)
        except ValueError as error:
            parser.error(str(error))
    for model in MODELS:
        for workers in FORMULA_WORKERS:
            record.measure(f"bytes {model} {workers}", partial(formulas, model, workers, workload))
    for workers in scope.workers:
        for model in scope.models:
            job = {"model": model, "workload": asdict(workload)}
            wanted = measurements(scope, workload, model, workers)
            for row in measure_missing(record, wanted, Network(workers), WORKER, job):
                _print(row)
    figures, notes = figures_of(record.rows)
    return record.publish(figures, draw, notes)


def measurements(scope: SplittingScope, workload: TerabyteWorkload, model: str, workers: int) -> Measurements:
    """What workers measure for one model, by the key of its row; links are not limited at first."""
    found: dict[str, Callable[[Workers, Network], Row]] = {
        f"counted {model} {workers}": lambda running, _: _count(running, workload, model, workers)
    }
    if workers == ERROR_WORKERS:
        found[f"errors {model} {workers}"] = lambda running, _: {
            "model": model,
            "wire_errors": running.ask(do="errors"),
        }
    for link in scope.links_gbit_per_s:
        key = f"time {model} {workers} {link_name(link)}"
        found[key] = partial(_time, model=model, workers=workers, link=link)
    return found


def formulas(model: str, num_ranks: int, workload: TerabyteWorkload) -> Row:
    """Bytes that a rank sends in a step, without those that are the same under every plan.

    `id_bytes` are those of ids and bag lengths.
    """
    unsharded, batch_size = workload.unsharded(model), workload.global_batch_size // num_ranks
    unique = {bags: unique_rows(workload, bags, num_ranks) for bags in BAGS}
    found = {bags: traffic_of(unsharded, num_ranks, batch_size, rows) for bags, rows in unique.items()}
    ids = {bags: id_traffic_of(unsharded, num_ranks, batch_size, sum(each)) for bags, each in BAGS.items()}
    return {
        "model": model,
        "workers": num_ranks,
        "split": found["one_hot"].split,
        "all_to_all": found["one_hot"].all_to_all,
        "pull_and_push": {bags: traffic.pull_and_push for bags, traffic in found.items()},
        "unique_rows": {bags: sum(rows) for bags, rows in unique.items()},
        "id_bytes": {bags: asdict(traffic) for bags, traffic in ids.items()},
    }


@cache
def unique_rows(workload: TerabyteWorkload, bags: str, num_ranks: int) -> tuple[float, ...]:
    """Unique rows of each table among a rank's samples, on average over ranks and batches."""
    counts = [
        [len(keys) for keys in workload.keys(number, bags, Ranks(rank, rank, num_ranks))]
        for number in range(workload.num_batches)
        for rank in range(num_ranks)
    ]
    return tuple(map(float, np.mean(counts, axis=0)))


def check(expected: Row, counted: Mapping[str, Sequence[float]], workload: TerabyteWorkload) -> None:
    """Compare counted bytes with the formulas.

    Under TorchRec's plan the mean over ranks counts, since whole tables cannot be quite even.

    Args:
        expected: from `formulas`.
        counted: bytes of every rank in rank order, by plan.
        workload: of both.

    Raises:
        RuntimeError: a counted value differs from its formula.
    """
    model, num_ranks = expected["model"], expected["workers"]
    outside = replicated_bytes(workload.unsharded(model), num_ranks)
    pairs = {
        "split": (max(counted["des"]) - outside, expected["split"]),
        "all-to-all": (mean(counted["torchrec"]) - outside, expected["all_to_all"]),
    }
    for name, (found, formula) in pairs.items():
        if not isclose(found, formula):
            raise RuntimeError(
                f"{model} on {num_ranks} ranks, {name}: {found:,.0f} bytes were counted, the formula says "
                f"{formula:,.0f}; one of dlrm/sharding/splitting/costs.py and wire.py is wrong"
            )


def replicated_bytes(unsharded: nn.Module, num_ranks: int) -> float:
    """Bytes of the all-reduce of dense gradients and flags, which every plan sends and savings leave out."""
    numbers = NUM_SCALARS + NUM_FLAGS + numbers_outside_tables(unsharded)
    for head in heads_of(unsharded).values():
        assert isinstance(head, Head)
        numbers -= numbers_outside_tables(head) - head.traffic().replicated
    return costs.most_sent(costs.all_reduce(numbers, num_ranks))


def _count(running: Workers, workload: TerabyteWorkload, model: str, workers: int) -> Row:
    counted = running.ask(do="count")
    check(formulas(model, workers, workload), counted, workload)
    return {"counted": counted}


def _time(running: Workers, network: Network, model: str, workers: int, link: float | None) -> Row:
    network.limit(link)
    return {"model": model, "workers": workers, "gbit_per_s": link, **running.ask(do="time")}


def _print(row: Row) -> None:
    if "rounds" not in row:
        print(f"{row['key']}: stored", flush=True)
        return
    (cell,) = cells_of([row])
    ratio, auto = cell.ratio("des", "torchrec"), cell.auto_ratio
    print(
        f"{cell.name}: des over torchrec {ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f}), auto "
        f"{dict(cell.chosen)} over the better one {auto.value:.3f} ({auto.low:.3f} to {auto.high:.3f}), "
        f"{len(cell.rounds)} rounds; {row['chosen']['by']}",
        flush=True,
    )
