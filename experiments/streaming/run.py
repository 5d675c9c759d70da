"""What training on data that streams in costs and keeps: `python -m experiments.streaming [--quick]`.

Two workers of one thread train the recipe `tiny` in fp32 on synthetic data, two days of three, and test on
the third. Figures, but for AUC and counts each a median over rounds, with `..._low` and `..._high`, the
extremes:

- `stream_auc_delta`: AUC of runs on a folder of files as a stream minus that of the same recipe, seeds and
  batches of the same files in their order (`data.shuffle=false`), with half its 95 % interval (`..._ci`).
- `stream_max_samples_per_s`: speed of these streams, which have all records waiting; `stream_speed_ratio`:
  over that of the files.
- `stream_lag_s`: age of the oldest record of a step, median over the steps of a run to which records come
  by Kafka, at half the speed of its training; `stream_folder_lag_s`: by a folder with a new file every half
  a second.
- `stream_backlog_error`: difference of the growth of the backlog by the step from the formula of ScaDLES, as
  a share of that, where records arrive by Kafka 1.5 times as fast as they are trained.
- `stream_largest_backlog`: most records that waited, over the limit, with `stream.backlog` and
  `stream.keep=newest`; `stream_unaccounted_records`: difference of those that arrived and those that were
  trained, left out or bad.
- `stream_lost_records`, `stream_repeated_records`: records that were never trained, and trained in more than
  one step, in runs on Kafka and a folder of which workers are killed (`stream_kills` in all). A step in which
  a worker dies does not count: it is trained again.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from data.synthetic import SyntheticConfig
from experiments.harness.command import experiment_parser
from experiments.harness.record import Record, Row
from experiments.harness.samples import generated
from experiments.streaming.figures import draw, figures_of
from experiments.streaming.measure import Effort, Measuring

__all__ = ["draw", "main"]

SEEDS: Final = 5
FULL: Final = Effort(
    rounds=3,
    rows_per_day=150_000,
    global_batch=512,
    small_batch=32,
    first_steps=1000,
    lag_s=15.0,
    backlog_s=30.0,
    settled_s=5.0,
    ends_after_s=10.0,
    kills=5,
    numbered_rows=100_000,
    numbered_per_s=2000.0,
)
QUICK: Final = Effort(
    rounds=1,
    rows_per_day=2048,
    global_batch=128,
    small_batch=32,
    first_steps=60,
    lag_s=2.0,
    backlog_s=2.0,
    settled_s=1.0,
    ends_after_s=3.0,
    kills=0,
    numbered_rows=600,
    numbered_per_s=300.0,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__, rounds=SEEDS)
    options = parser.parse_args(arguments)
    if find_spec("confluent_kafka") is None:
        parser.exit(1, f'{parser.prog}: streams of Kafka need confluent-kafka: pip install ".[kafka]"\n')
    effort, seeds = (QUICK, 2) if options.quick else (FULL, options.rounds)
    config = {"seeds": seeds, **asdict(effort)}
    record = Record("streaming", config, seeds=list(range(seeds)), quick=options.quick)
    with tempfile.TemporaryDirectory(prefix="streaming-") as folder:
        scratch = Path(folder)
        synthetic = SyntheticConfig(
            days=3, rows_per_day=effort.rows_per_day, rows_per_block=2048, rows_per_file=32_768
        )
        measuring = Measuring(
            dataset=generated(synthetic, scratch / "data"),
            numbered=scratch / "numbered",
            scratch=scratch,
            effort=effort,
        )
        for seed in range(seeds):
            for measure in (measuring.files, measuring.stream)[:: -1 if seed % 2 else 1]:
                _measure(record, measure.__name__, seed, partial(measure, seed))
        for number in range(effort.rounds):
            kafka = _measure(record, "kafka", number, partial(measuring.arriving, "kafka", number))
            _measure(record, "folder", number, partial(measuring.arriving, "folder", number))
            speed = kafka["samples_per_s"]
            _measure(record, "limited", number, partial(measuring.limited, number, speed))
        for kind in ("kafka", "folder"):
            _measure(record, f"killed_{kind}", 0, partial(measuring.killed, kind))
    return record.publish(figures_of(record.rows), draw)


def _measure(record: Record, case: str, number: int, measure: Callable[[], Row]) -> Row:
    row = record.measure(f"{case} {number}", lambda: {"case": case, "round": number, **measure()})
    numbers = {name: value for name, value in row.items() if isinstance(value, int | float)}
    print(case, ", ".join(f"{name} {value:,.6g}" for name, value in numbers.items()), flush=True)
    return row
