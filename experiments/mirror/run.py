"""What mirrors cost a training step, and how old they are: `python -m experiments.mirror [--quick]`.

Two workers, each in a node of its own with a link of 1, 5 or 25 Gb/s, train 26 tables of 100,000 rows and 64
columns, batch 2048, in fp32. Without mirrors, with a moment in every step, and with one in every eight steps
they take turns, in a new random order every round. The two workers share two cores, on which a mirror is also
copied, sent, received and written: none of that is hidden, as it would be beside a GPU. An interrupted
command continues with the next speed. Figures, `GBIT` being the speed of the links:

- `mirror_step_share_GBIT`, `mirror_step_share_every_8_GBIT`: additional time of a step, as a share of one
  without mirrors: the median over rounds of the ratio within a round, minus 1; with `..._low` and `..._high`,
  its 95 % interval (bootstrap over rounds).
- `mirror_bytes_per_step`: what a worker sends in a step when it sends one moment for each.
- `mirror_age_steps_GBIT`: most steps that a mirror was behind, in the median of the rounds, with a moment in
  every step unless the one before is on its way.
- `step_s_GBIT`: median time of a step without mirrors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from matplotlib.figure import Figure

from experiments.checkpointing.job import TrainingJob
from experiments.harness.command import experiment_parser, require_links
from experiments.harness.network import Network, leave_tidily
from experiments.harness.record import Record, Row
from experiments.harness.statistics import Ratio
from experiments.harness.workers import Workers, measure_missing

NODES: Final = 2
SPEEDS: Final = (1, 5, 25)
"""Of links, in Gb/s."""
NONE: Final = "none"
EVERY: Final = {"all": 1, "every_8": 8}
"""Steps between moments, by contender."""
ENDINGS: Final = {"all": "", "every_8": "_every_8"}
"""In the names of figures."""
LABELS: Final = {"all": "a moment in every step", "every_8": "a moment in every 8 steps"}


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Number of rounds, and of timed steps of each contender in a round."""

    rounds: int = 7
    steps: int = 40


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__)
    quick = parser.parse_args(arguments).quick
    require_links(parser)
    leave_tidily()
    job, pace = TrainingJob(rows=100_000), Rounds()
    speeds: Sequence[int] = SPEEDS
    if quick:
        job, pace = TrainingJob(rows=500, global_batch_size=64), Rounds(rounds=2, steps=8)
        speeds = SPEEDS[-1:]
    config = {"rows": job.rows, "batch_size": job.global_batch_size, "speeds": speeds}
    record = Record("mirror", config | asdict(pace), seeds=[job.seed], quick=quick)
    measurements = {f"{gbit} Gb/s": partial(_measure, gbit) for gbit in speeds}
    request = {"job": asdict(job), "pace": asdict(pace)}
    network = Network(NODES)
    for row in measure_missing(record, measurements, network, "experiments.mirror.worker", request):
        print(f"{row['key']}: stored", flush=True)
    return record.publish(figures_of(record.rows), draw)


def _measure(gbit: int, workers: Workers, network: Network) -> Row:
    network.limit(float(gbit))
    return {"gbit": gbit, **workers.ask()}


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures, from the rows of the result, one for each speed."""
    figures: dict[str, float] = {}
    for row in rows:
        gbit, rounds = row["gbit"], row["rounds"]
        figures[f"step_s_{gbit}"] = median(each[NONE] for each in rounds)
        for name, share in _shares(row):
            figures |= {
                f"mirror_step_share{ENDINGS[name]}_{gbit}{edge}": value
                for edge, value in (("", share.value - 1), ("_low", share.low - 1), ("_high", share.high - 1))
            }
        figures[f"mirror_age_steps_{gbit}"] = median(each["oldest"] for each in row["mirrors"])
    moments = [each for row in rows for each in row["mirrors"]]
    figures["mirror_bytes_per_step"] = median(each["num_bytes"] / each["moments"] for each in moments)
    return figures


def _shares(row: Row) -> Iterator[tuple[str, Ratio]]:
    for name in EVERY:
        yield name, Ratio.of([each[name] / each[NONE] for each in row["rounds"]])


def draw(result: Row, folder: Path) -> None:
    """Draw the additional time of a step against the speed of the links."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained")
    axes = figure.subplots()
    speeds = [row["gbit"] for row in result["rows"]]
    for name, label in LABELS.items():
        found = [dict(_shares(row))[name] for row in result["rows"]]
        values = [100 * (each.value - 1) for each in found]
        below = [100 * (each.value - each.low) for each in found]
        above = [100 * (each.high - each.value) for each in found]
        axes.errorbar(speeds, values, yerr=[below, above], fmt="o-", capsize=4, label=label)
    axes.set_xscale("log")
    axes.set_xticks(speeds, [f"{speed}" for speed in speeds])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("speed of the links in Gb/s")
    axes.set_ylabel("% of a step")
    axes.set_title("What a mirror of all rows adds to a step, two nodes on two cores", fontsize=10)
    axes.legend(fontsize=9)
    figure.savefig(folder / "mirror.png", dpi=150)
