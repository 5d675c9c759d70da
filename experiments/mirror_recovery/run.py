"""How soon a lost node trains again from a mirror: `python -m experiments.mirror_recovery [--quick]`.

Two nodes with a worker each and a link of 25 Gb/s, every node a `cpr run` with its torchrun, train 26 tables
of 64 columns with row-wise Adagrad, 0.7 GB a node. They save everything once, and the mirrors, if there are
any, are whole. Then all processes of the second node are killed with -9, its memory is wiped, and a new node
with nothing in memory starts in its place at once. The clock runs until both workers have done a new training
step. Where the rows come from a mirror (`mirror.to=neighbour`) and where they come from the checkpoint
(`mirror.to=none`) take turns, in a new random order every round, each in a run of its own; a first round,
which warms the machine's memory up, does not count. An interrupted command continues where it stopped.

The checkpoint's files are in the page cache, which favours the checkpoint: a new machine would read them from
storage. Both sides contain what starting takes: noticing the loss, a new torchrun and its worker's imports,
and the rendezvous. A machine that loses its power is noticed later than killed processes, on both sides.
Figures:

- `mirror_recovery_ratio`: seconds with the mirror over those with the checkpoint: the median over rounds of
  the ratio within a round, with `..._low` and `..._high`, its 95 % interval (bootstrap over rounds).
- `mirror_recovery_ratio_after_rendezvous`: the same from when all workers have met, without the start.
- `recovery_s_mirror`, `recovery_s_checkpoint`, and each with `..._after_rendezvous`: medians of the seconds.

The rows have the phases, and what the recoveries report themselves.
"""

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Final

from matplotlib.figure import Figure

from experiments.checkpointing.job import TrainingJob
from experiments.harness.command import experiment_parser, require_links
from experiments.harness.network import Network, leave_tidily
from experiments.harness.plotting import median_bars
from experiments.harness.record import QUICK, Record, Row
from experiments.harness.statistics import Ratio
from experiments.recovery.launch import NODES, NodesRun
from experiments.recovery.timeline import Mark, have_all, phases, read_marks

ROUNDS: Final = 5
SEED: Final = 1
GBIT: Final = 25.0
LOST: Final = 1
"""The node that is lost; the first one hosts the rendezvous."""
SIDES: Final = {"mirror": ("neighbour", "mirror"), "checkpoint": ("none", "partial")}
"""Where rows come from: `mirror.to`, and the kind of recovery that follows."""
WARM_UP: Final = "warm-up"
"""Key of the round that does not count."""
TRAINING_S: Final = (1.0, 2.0)
"""The loss comes at a seeded random time in this range after all is ready for it."""
PATIENCE_S: Final = 180.0
SCRATCH: Final = Path("runs") / "mirror-recovery"
"""Checkpoint, log and timeline of a run, up to 3 GB, under the current folder; deleted at the end."""
LABELS: Final = {
    "met": "loss noticed, node started,\nrendezvous",
    "built": "model built",
    "restored": "rows and states in place,\nmirrors started",
    "stepped": "first step",
}
"""The phases, by the event that ends them."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__, rounds=ROUNDS)
    options = parser.parse_args(arguments)
    require_links(parser)
    leave_tidily()
    job, rounds = TrainingJob(rows=200_000), options.rounds
    if options.quick:
        job, rounds = TrainingJob(rows=4000, global_batch_size=256), 1
    config = asdict(job) | {"rounds": rounds, "gbit": GBIT, "nodes": NODES}
    record = Record("mirror_recovery", config, seeds=[SEED], quick=options.quick)
    losses = Losses(job, QUICK / "mirror-recovery" if options.quick else SCRATCH)
    keys = [f"round {number}" for number in range(rounds)]
    for key in keys if options.quick else [WARM_UP, *keys]:
        row = record.measure(key, partial(losses.round, key))
        took = [f"{side} {sum(row[side]['phases'].values()):.1f} s" for side in SIDES]
        print(f"{key}: {', '.join(took)}", flush=True)
    return record.publish(figures_of(record.rows), draw)


@dataclass(frozen=True)
class Losses:
    """Runs that lose a node.

    Args:
        job: what they train.
        scratch: folder of one run at a time, removed after it.
    """

    job: TrainingJob
    scratch: Path

    def round(self, key: str) -> Row:
        """What a recovery of each side took."""
        sides = list(SIDES)
        Random(f"{SEED} {key}").shuffle(sides)
        return {side: self._loss(side, key) for side in sides}

    def _loss(self, side: str, key: str) -> Row:
        shutil.rmtree(self.scratch, ignore_errors=True)  # of a run that was killed
        folder, (to, kind) = self.scratch.absolute(), SIDES[side]
        timeline, saved = folder / "timeline.jsonl", folder / "saved"
        request = {"job": asdict(self.job), "mirror": to, "timeline": str(timeline), "saved": str(saved)}
        worker = "experiments.mirror_recovery.worker"
        try:
            with Network(NODES) as network:
                network.limit(GBIT)
                nodes = NodesRun(folder / "run", [json.dumps(request)], 1, module=worker, network=network)
                with nodes as run:
                    run.wait_for(lambda: have_all(read_marks(timeline), "ready", 0, NODES), PATIENCE_S)
                    for path in filter(Path.is_file, saved.rglob("*")):
                        path.read_bytes()  # into the page cache, past which it was written
                    time.sleep(Random(f"{SEED} {key}").uniform(*TRAINING_S))
                    lost_at = time.time()
                    run.replace_node(LOST)
                    run.wait_for(lambda: _continues(read_marks(timeline)), PATIENCE_S)
            return _recovery(read_marks(timeline), lost_at, kind)
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)


def _newest(marks: Sequence[Mark]) -> int:
    return max((each["generation"] for each in marks), default=0)


def _continues(marks: Sequence[Mark]) -> bool:
    """Whether all workers of a new generation have done a step."""
    return _newest(marks) > 0 and have_all(marks, "stepped", _newest(marks), NODES)


def _recovery(marks: Sequence[Mark], lost_at: float, kind: str) -> Row:
    """Phases of a recovery in seconds, and its report, with the seconds of each rank.

    Raises:
        RuntimeError: the recovery was of another kind than it was to be.
    """
    generation = _newest(marks)
    stepped = [each for each in marks if (each["event"], each["generation"]) == ("stepped", generation)]
    reports = [each["report"] for each in sorted(stepped, key=lambda each: int(each["rank"]))]
    if reports[0]["kind"] != kind:
        raise RuntimeError(f"a recovery was to be of the kind {kind}, and was {reports[0]}")
    return {
        "phases": phases(marks, generation, lost_at, tuple(LABELS)),
        **reports[0],
        "seconds": [each["seconds"] for each in reports],
    }


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures, from the rows of the result."""
    figures: dict[str, float] = {}
    for ending, events in (("", tuple(LABELS)), ("_after_rendezvous", tuple(LABELS)[1:])):
        took = {
            side: [sum(row[side]["phases"][event] for event in events) for row in _counted(rows)]
            for side in SIDES
        }
        pairs = zip(took["mirror"], took["checkpoint"], strict=True)
        ratio = Ratio.of([mirror / checkpoint for mirror, checkpoint in pairs])
        figures |= ratio.figures(f"mirror_recovery_ratio{ending}")
        figures |= {f"recovery_s_{side}{ending}": median(seconds) for side, seconds in took.items()}
    return figures


def _counted(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["key"] != WARM_UP]


def draw(result: Row, folder: Path) -> None:
    """Draw the seconds of each phase with the mirror and with the checkpoint."""
    rows = _counted(result["rows"])
    measured = {
        f"{label}: {side}": [row[side]["phases"][event] for row in rows]
        for event, label in LABELS.items()
        for side in SIDES
    }
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    median_bars(axes, measured, highlighted=[label for label in measured if label.endswith("mirror")])
    axes.set_xlabel("seconds after the loss of a node (bar: median; dots: rounds)")
    figure.savefig(folder / "mirror_recovery.png", dpi=110)
