"""What a failure costs under `cpr.PartialRecovery`: `python -m experiments.recovery [--quick]`.

Two and four workers train 26 tables of 64 columns, 2.6 GB with the state of row-wise Adagrad. One is killed
with -9 at a seeded random moment; the clock runs until every worker has done a new training step. The rival
is plain torchrun with a full reload from `torch.distributed.checkpoint`, whose files are in the page cache
from writing; both take turns. Interrupted, the command goes on where it stopped; parts can be measured alone
(`--parts`). Figures:

- `time_ratio_2`, `time_ratio_4`: our time over the rival's, median over rounds of the ratio within a round,
  with `..._low` and `..._high`, the extremes. `seconds_2`, `rival_seconds_2` and so on: medians of the times.
- `first_restart_success`: share of runs that went on and ended by themselves after one kill, with the plain
  command.
- `rows_kept_wrong`, `rows_restored_wrong`, `dense_wrong`: after a kill between the backward pass and the
  exchange of gradients, rows that differ from before (those that the interrupted step touches left out), lost
  rows that differ from the newest save, optimizer state included, and dense tensors that differ.
  `batches_twice`, `batches_left_out`: batches trained on twice, and left out though not interrupted. Over 2
  and 4 workers, with and without the dead worker's memory.
- `soak_failures`, `soak_auc_delta`, `soak_pls`, `soak_leftovers`: from `python -m experiments.recovery_soak`.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

from experiments.checkpointing.job import Job
from experiments.harness.record import QUICK, RESULTS, Record, Row
from experiments.recovery.exactness import CASES, case_name, check_case
from experiments.recovery.picture import draw
from experiments.recovery.restarts import Restarts
from experiments.recovery.timing import Timing

ROUNDS: Final = 5
RESTARTS: Final = 20
WORLD_SIZES: Final[tuple[int, ...]] = (2, 4)
SEED: Final = 1
PARTS: Final = ("exactness", "restarts", "timing")
SCRATCH: Final = Path("runs") / "recovery"
"""Checkpoints and notes, up to 6 GB, under the current folder; deleted at the end."""
COUNTS: Final = ("rows_kept_wrong", "rows_restored_wrong", "dense_wrong", "batches_twice", "batches_left_out")
SOAK: Final = ("soak_failures", "soak_auc_delta", "soak_pls", "soak_leftovers")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; store its result and draw its picture when all parts are measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a small run, which overwrites no stored result")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of the timing; default {ROUNDS}")
    parser.add_argument("--restarts", type=int, default=RESTARTS, help=f"default {RESTARTS}")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="measure only these now")
    options = parser.parse_args(arguments)
    job, sizes, rounds, restarts = Job(), WORLD_SIZES, options.rounds, options.restarts
    if options.quick:
        job, sizes, rounds, restarts = Job(rows=4000, global_batch_size=256), WORLD_SIZES[:1], 1, 1
    config = asdict(job) | {"world_sizes": sizes, "rounds": rounds, "restarts": restarts}
    record = Record("recovery", config, seeds=[SEED], quick=options.quick)
    scratch = QUICK / "recovery" if options.quick else SCRATCH
    wanted = measurements(job, sizes, rounds, restarts, scratch)
    try:
        measure(record, {key: wanted[key] for key in wanted if wanted[key][0] in options.parts})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    missing = wanted.keys() - {row["key"] for row in record.rows}
    if missing:
        print(f"{len(missing)} measurements are left for other parts: the result is not finished")
        return 0
    figures, notes = figures_of(record.rows, sizes)
    path = record.finish(figures, notes)
    draw(record.rows, path.with_suffix(".png"))
    print(f"{json.dumps(figures, indent=1)}\nstored in {path}")
    return 0


Measurement = tuple[str, Callable[[], Row]]
"""The part that it belongs to, and what makes its row."""


def measurements(
    job: Job, sizes: Sequence[int], rounds: int, restarts: int, scratch: Path
) -> dict[str, Measurement]:
    """All of them by key, in their order."""
    found: dict[str, Measurement] = {}
    for size, wipe in CASES:
        if size in sizes:
            function = partial(check_case, scratch / "exactness", size, wipe)
            found[case_name(size, wipe)] = "exactness", function
    runs = Restarts(scratch / "restarts", SEED)
    for number in range(restarts):
        found[f"restart {number}"] = "restarts", partial(runs.restart, number)
    timing = Timing(job, scratch / "timing", SEED)
    for size in sizes:
        for number in range(rounds):
            found[f"{size} workers, round {number}"] = "timing", partial(timing.round, number, size)
    return found


def measure(record: Record, wanted: Mapping[str, Measurement]) -> None:
    """Measure what is not in the record yet."""
    for key, (_, function) in wanted.items():
        record.measure(key, function)
        print(f"{key}: stored", flush=True)


def figures_of(rows: Sequence[Row], sizes: Sequence[int]) -> tuple[dict[str, float | None], dict[str, str]]:
    """All figures, and a note for each that is missing."""
    figures: dict[str, float | None] = {}
    notes: dict[str, str] = {}
    for size in WORLD_SIZES:
        rounds = [row["phases"] for row in rows if row.get("world_size") == size and "phases" in row]
        names = [f"{name}_{size}" for name in ("time_ratio", "seconds", "rival_seconds")]
        if size not in sizes:
            figures |= dict.fromkeys(names)
            notes |= dict.fromkeys(names, "only in a whole run")
            continue
        ours = [sum(each["ours"].values()) for each in rounds]
        rival = [sum(each["rival"].values()) for each in rounds]
        ratios = [mine / theirs for mine, theirs in zip(ours, rival, strict=True)]
        figures |= {names[0]: median(ratios), f"{names[0]}_low": min(ratios), f"{names[0]}_high": max(ratios)}
        figures |= {names[1]: median(ours), names[2]: median(rival)}
    successes = [row["success"] for row in rows if "success" in row]
    figures["first_restart_success"] = sum(successes) / len(successes)
    for count in COUNTS:
        figures[count] = sum(row[count] for row in rows if count in row)
    soak = _soak_figures()
    for name in SOAK:
        figures[name] = soak.get(name)
        if figures[name] is None:
            notes[name] = "python -m experiments.recovery_soak has not been run to its end"
    return figures, notes


def _soak_figures() -> dict[str, float]:
    """Of the stored result of the soak, if it is finished."""
    path = RESULTS / "recovery_soak.json"
    stored: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"finished": None}
    return dict(stored["figures"]) if stored["finished"] else {}
