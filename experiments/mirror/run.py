"""What mirrors cost a training step, and how old they are: `python -m experiments.mirror [--quick]`.

Two or four workers, each in a node of its own with a link of 1, 5 or 25 Gb/s, train in fp32 with row-wise
Adagrad: the recipe `terabyte` with 26 tables of 100,000 rows and 64 columns, batch 2048, or `tiny` with 26
tables of 3,000 rows and 16 columns, batch 1024. Without a mirror, with one of all rows that gets a moment in
every step, and with one of the rows that MFU chooses within an eighth of the memory and a moment in every
eight steps they take turns, in a new random order every round. Mirrors are whole before the first turn, and
each turn begins with steps that are not timed. Tables live in shared memory; a mirror of all rows comes with
copies of rows before they change, for partial recovery. All workers share two cores, on which a mirror is
also copied, sent, received and written: none of that is hidden, as it would be next to a GPU. Every layout
and speed is a row of the result; an interrupted command continues with the next. Figures, `GBIT` being the
speed of the links, of `terabyte` on two nodes; the others have `_tiny` or `_nodes_4` before it, and those of
chosen rows `_priority` after their first words:

- `mirror_step_share_GBIT`, `mirror_step_share_priority_GBIT`: additional time of a step, as a share of one
  without mirrors: the median over rounds of the ratio within a round, minus 1; with `..._low` and `..._high`,
  its 95 % interval (bootstrap over rounds).
- `mirror_cpu_s_GBIT`: additional processor time of a step, in the mean of the workers and the median of the
  rounds, without the kernel's interrupts for the network: what a GPU would leave to cores that are free.
- `mirror_bytes_per_step_GBIT`: what a worker sends in a step, in the median of the rounds.
- `mirror_age_steps_GBIT`: most steps that a mirror was behind in a turn, in the median of the rounds, with a
  moment in every step unless the one before is on its way: 1 is the least.
- `step_s_GBIT`: median time of a step without mirrors.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from matplotlib.figure import Figure

from experiments.checkpointing.job import TrainingJob
from experiments.harness.command import experiment_parser, require_links
from experiments.harness.network import Network, leave_tidily
from experiments.harness.record import Record, Row
from experiments.harness.statistics import Ratio
from experiments.harness.workers import Workers, measure_missing

NONE: Final = "none"
MIRRORS: Final[dict[str, dict[str, Any]]] = {
    "all": {"every_steps": 1},
    "priority": {"every_steps": 8, "rows": "priority"},
}
"""Settings of mirrors, by contender."""
MEMORY_SHARE: Final = 1 / 8
"""Of the memory of all rows, for a mirror of chosen ones."""
LABELS: Final = {"all": "all rows, every step", "priority": "1/8 of the rows (MFU), every 8 steps"}


@dataclass(frozen=True, kw_only=True)
class Effort:
    """What is measured, and for how long."""

    jobs: Mapping[str, TrainingJob]
    steps: Mapping[str, int]
    """Timed steps of each contender in a round, by job."""
    nodes: Sequence[int]
    rounds: Mapping[int, int]
    """By speed of the links, in Gb/s."""


NUM_BATCHES: Final = 256
"""So many that an eighth of the rows is fewer than are looked up."""
FULL: Final = Effort(
    jobs={
        "terabyte": TrainingJob(rows=100_000, num_batches=NUM_BATCHES),
        "tiny": TrainingJob(recipe="tiny", rows=3000, global_batch_size=1024, num_batches=NUM_BATCHES),
    },
    steps={"terabyte": 24, "tiny": 80},
    nodes=(2, 4),
    rounds={1: 7, 5: 7, 25: 15},
)
QUICK: Final = Effort(
    jobs={"terabyte": TrainingJob(rows=500, global_batch_size=64)},
    steps={"terabyte": 8},
    nodes=(2,),
    rounds={25: 2},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__)
    quick = parser.parse_args(arguments).quick
    require_links(parser)
    leave_tidily()
    effort = QUICK if quick else FULL
    seeds = sorted({job.seed for job in effort.jobs.values()})
    config = asdict(effort) | {"mirrors": MIRRORS, "memory_share": MEMORY_SHARE}
    record = Record("mirror", config, seeds, quick=quick)
    for job in effort.jobs:
        for nodes in effort.nodes:
            _measure_layout(record, effort, job, nodes)
    return record.publish(figures_of(record.rows), draw)


def _measure_layout(record: Record, effort: Effort, job: str, nodes: int) -> None:
    """Measure all speeds of one job on so many nodes, in one launch."""
    cells = [Cell(job=job, nodes=nodes, gbit=gbit) for gbit in effort.rounds]
    measurements = {str(cell): partial(_measure, cell, effort) for cell in cells}
    # made here, so that it goes even if the workers are killed
    with tempfile.TemporaryDirectory(prefix="experiment-", dir="/dev/shm") as memory:
        request = {"job": asdict(effort.jobs[job]), "memory": memory}
        module, network = "experiments.mirror.worker", Network(nodes)
        for row in measure_missing(record, measurements, network, module, request):
            print(f"{row['key']}: stored", flush=True)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What a row of the result measures."""

    job: str
    nodes: int
    gbit: int

    def __str__(self) -> str:
        return f"{self.job}, {self.nodes} nodes, {self.gbit} Gb/s"

    def figure(self, name: str) -> str:
        """Name of a figure of this cell."""
        job = "" if self.job == "terabyte" else f"_{self.job}"
        nodes = "" if self.nodes == 2 else f"_nodes_{self.nodes}"
        return f"{name}{job}{nodes}_{self.gbit}"


def _measure(cell: Cell, effort: Effort, workers: Workers, network: Network) -> Row:
    network.limit(float(cell.gbit))
    orders, rounds, num_rounds = Random(0), [], effort.rounds[cell.gbit]
    for number in range(num_rounds):
        order = [NONE, *MIRRORS]
        orders.shuffle(order)
        rounds.append(workers.ask(order=order, steps=effort.steps[cell.job]))
        took_ms = [f"{name} {1000 * rounds[-1][name]['step_s']:.1f}" for name in (NONE, *MIRRORS)]
        print(f"{cell}: round {number + 1} of {num_rounds}, ms a step: {', '.join(took_ms)}", flush=True)
    return {**asdict(cell), "rounds": rounds}


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures, from the rows of the result."""
    figures: dict[str, float] = {}
    for row in rows:
        cell, rounds = Cell(job=row["job"], nodes=row["nodes"], gbit=row["gbit"]), row["rounds"]
        figures[cell.figure("step_s")] = median(each[NONE]["step_s"] for each in rounds)
        for name in MIRRORS:
            ending = "" if name == "all" else f"_{name}"
            share = _share(row, name)
            figures |= {
                cell.figure(f"mirror_step_share{ending}") + edge: value
                for edge, value in (("", share.value - 1), ("_low", share.low - 1), ("_high", share.high - 1))
            }
            cpu_s = [(each[name]["cpu_s"] - each[NONE]["cpu_s"]) for each in rounds]
            figures[cell.figure(f"mirror_cpu_s{ending}")] = median(cpu_s)
            for figure in ("bytes_per_step", "age_steps"):
                of_rounds = [each[name][figure] for each in rounds]
                figures[cell.figure(f"mirror_{figure}{ending}")] = median(of_rounds)
    return figures


def _share(row: Row, name: str) -> Ratio:
    return Ratio.of([each[name]["step_s"] / each[NONE]["step_s"] for each in row["rounds"]])


def draw(result: Row, folder: Path) -> None:
    """Draw the additional time of a step against the speed of the links, for each layout."""
    layouts = list(dict.fromkeys((row["job"], row["nodes"]) for row in result["rows"]))
    figure = Figure(figsize=(2.4 + 2.6 * len(layouts), 3.6), layout="constrained")
    panels = figure.subplots(1, len(layouts), sharey=True, squeeze=False)[0]
    for axes, (job, nodes) in zip(panels, layouts, strict=True):
        rows = [row for row in result["rows"] if (row["job"], row["nodes"]) == (job, nodes)]
        speeds = [row["gbit"] for row in rows]
        for name, label in LABELS.items():
            shares = [_share(row, name) for row in rows]
            reach = list(_percent(shares))
            below, above = [low for low, _ in reach], [high for _, high in reach]
            values = [100 * (each.value - 1) for each in shares]
            axes.errorbar(speeds, values, yerr=[below, above], fmt="o-", capsize=4, label=label)
        axes.axhline(0, color="tab:gray", linewidth=0.8)
        axes.set_xscale("log")
        axes.set_xticks(speeds, [f"{speed}" for speed in speeds])
        axes.set_xlabel("speed of the links in Gb/s")
        axes.set_title(f"{job}, {nodes} nodes", fontsize=10)
    panels[0].set_ylabel("% of a step that a mirror adds")
    panels[-1].legend(fontsize=8)
    figure.savefig(folder / "mirror.png", dpi=150)


def _percent(shares: Sequence[Ratio]) -> Iterator[tuple[float, float]]:
    """How far the interval of each share reaches below and above it, in percent of a step."""
    for each in shares:
        yield 100 * (each.value - each.low), 100 * (each.high - each.value)
