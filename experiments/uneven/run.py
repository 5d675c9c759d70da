"""What batches by measured speed gain where workers are unequal: `python -m experiments.uneven [--quick]`.

Two workers of one thread train the recipe `kaggle` in fp32 on synthetic data, with `train.batching` `even`
and `dynamic` in turns, each with the same seeds. Control groups limit their processor time. Figures, but for
the AUC each a median over rounds, with `..._low` and `..._high`, the extremes:

- `uneven_speedup_4x`: samples/s of `dynamic` over `even`, in the second half of a run in which a worker has a
  quarter of a core.
- `uneven_auc_delta`: AUC of `dynamic` minus that of `even` in these runs, with half its 95 % interval
  (`..._ci`).
- `even_cost_share`: time that `dynamic` adds to a step where no worker is limited, of the step. It is
  switched off and on every few steps of a run, since two runs differ by more for reasons of their own.
- `batch_changes_per_minute`: where each worker gets 0.7 to 1 of a core, drawn anew every half second.
- `follow_s`: from the moment when a worker falls to a quarter of a core until sizes have changed for the last
  time by a tenth or more.
"""

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any, Final

from matplotlib.figure import Figure

from data.synthetic import SyntheticConfig, generate
from experiments.harness.command import experiment_parser
from experiments.harness.launch import torchrun
from experiments.harness.plotting import median_bars
from experiments.harness.processor_limits import Group, NoControlGroupError, groups
from experiments.harness.record import Record, Row
from experiments.harness.statistics import Estimate, median_figures
from experiments.uneven.switched import added_share
from experiments.uneven.worker import FOLDERS, TIMES

ROUNDS: Final = 5
WORKERS: Final = 2
GLOBAL_BATCH: Final = 2048
TRAIN_DAYS: Final = 4
"""Days of a run; another one is evaluated, with the same limits."""
SLOW_CORES: Final = 0.25
NOISE_S: Final = 0.5
LEAST_CORES: Final = 0.7
FALLS_AFTER_S: Final = 40.0
KINDS: Final = ("even", "dynamic")
Drive = Callable[[Sequence[Group], Event], float | None]
"""Changes limits during a run, until the event is set; returns the time (Unix, s) of a change that counts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment, store its result and draw its picture."""
    parser = experiment_parser(__doc__, rounds=ROUNDS)
    options = parser.parse_args(arguments)
    rounds, steps = (2, 48) if options.quick else (options.rounds, 320)
    rows = GLOBAL_BATCH * steps // TRAIN_DAYS
    config = {"rounds": rounds, "steps": steps, "global_batch": GLOBAL_BATCH, "slow_cores": SLOW_CORES}
    record = Record("uneven", config, seeds=list(range(rounds)), quick=options.quick)
    try:
        with tempfile.TemporaryDirectory(prefix="uneven-") as scratch, groups(WORKERS) as of_ranks:
            data = Path(scratch) / "data"
            generate(SyntheticConfig(scale=0.003, days=TRAIN_DAYS + 1, rows_per_day=rows), data)
            run = partial(_run, data=data, scratch=Path(scratch), of_ranks=of_ranks, steps=steps)
            for number in range(rounds):
                for kind in KINDS[:: -1 if number % 2 else 1]:
                    _measure(record, f"slow {number} {kind}", partial(run, kind, number, _slow))
                switched = partial(run, "dynamic", number, _unlimited, times=Path(scratch) / "times")
                _measure(record, f"equal {number}", switched)
                _measure(record, f"noise {number}", partial(run, "dynamic", number, _noisy))
                _measure(record, f"fall {number}", partial(run, "dynamic", number, _falling))
    except NoControlGroupError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")
    return record.publish(figures_of(record.rows), draw)


def _measure(record: Record, key: str, run: Callable[[], Row]) -> None:
    case, number, *kind = key.split()
    circumstances = {"case": case, "round": int(number), "kind": (kind or ["dynamic"])[0]}
    row = record.measure(key, lambda: circumstances | run())
    print(f"{key}: {row['samples_per_s']:,.0f} samples/s, {len(row['sizes'])} changes of sizes", flush=True)


def _unlimited(of_ranks: Sequence[Group], ended: Event) -> None:
    ended.wait()


def _slow(of_ranks: Sequence[Group], ended: Event) -> None:
    of_ranks[-1].limit(SLOW_CORES)
    ended.wait()


def _noisy(of_ranks: Sequence[Group], ended: Event) -> None:
    draw = random.Random(0)
    while not ended.wait(NOISE_S):
        for group in of_ranks:
            group.limit(draw.uniform(LEAST_CORES, 1))


def _falling(of_ranks: Sequence[Group], ended: Event) -> float:
    ended.wait(FALLS_AFTER_S)
    fell = time.time()
    of_ranks[-1].limit(SLOW_CORES)
    ended.wait()
    return fell


def _run(
    kind: str,
    seed: int,
    drive: Drive,
    *,
    data: Path,
    scratch: Path,
    of_ranks: Sequence[Group],
    steps: int,
    times: Path | None = None,
) -> Row:
    """Train once, and read the rate of the second half, changes of sizes, the AUC and the run's length.

    With a file for `times`, batching is switched off and on, and the row has what it adds to a step.
    """
    folder = scratch / "runs"
    settings = {
        "data.uri": data,
        "data.train_days": list(range(TRAIN_DAYS)),
        "data.test_days": [TRAIN_DAYS],
        "data.global_batch_size": GLOBAL_BATCH,
        "sharding.data_parallel_rows": 0,
        "train.precision": "fp32",
        "train.device": "cpu",
        "train.batching": kind,
        "train.max_steps": steps,
        "train.seed": seed,
        "train.log_every_steps": 4,
        "train.run_folder": folder,
    }
    ended = Event()
    for group in of_ranks:
        group.limit(None)
    with ThreadPoolExecutor(1) as threads:
        driver = threads.submit(drive, of_ranks, ended)
        try:
            torchrun(
                "experiments.uneven.worker",
                ["--recipe", "kaggle", "--set", *(f"{name}={value}" for name, value in settings.items())],
                processes=WORKERS,
                threads=1,
                environment={FOLDERS: json.dumps([str(group.folder) for group in of_ranks])}
                | ({} if times is None else {TIMES: str(times)}),
            )
        finally:
            ended.set()
    (run,) = folder.iterdir()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    report = json.loads((run / "report.json").read_text())
    shutil.rmtree(folder)
    row = _read(lines, report) | {"fell": driver.result()}
    return row if times is None else row | {"added_share": added_share(json.loads(times.read_text()))}


def _read(lines: Sequence[dict[str, Any]], report: dict[str, Any]) -> Row:
    trained = [line for line in lines if line["kind"] == "train"]
    first, half, last = trained[0], trained[len(trained) // 2], trained[-1]
    changes = [line for line in lines if line["kind"] == "batch_sizes"]
    return {
        "samples_per_s": (last["samples"] - half["samples"]) / (last["time"] - half["time"]),
        "began": first["time"],
        "ended": last["time"],
        "sizes": [[line["time"], *(line[f"rank_{rank}"] for rank in range(WORKERS))] for line in changes],
        "auc": report["metrics"]["auc"],
    }


def _rounds(rows: Sequence[Row], case: str, kind: str = "dynamic") -> list[Row]:
    """Rows of a case, by round."""
    return sorted(
        (row for row in rows if (row["case"], row["kind"]) == (case, kind)), key=lambda row: int(row["round"])
    )


def figures_of(rows: Sequence[Row]) -> dict[str, float]:
    """All figures."""
    even, dynamic = (_rounds(rows, "slow", kind) for kind in KINDS)
    pairs = list(zip(dynamic, even, strict=True))
    ratios = [one["samples_per_s"] / other["samples_per_s"] for one, other in pairs]
    changes = [60 * len(row["sizes"]) / (row["ended"] - row["began"]) for row in _rounds(rows, "noise")]
    followed = [follow_s(row) for row in _rounds(rows, "fall")]
    return {
        **median_figures("uneven_speedup_4x", ratios),
        **Estimate.of([one["auc"] - other["auc"] for one, other in pairs]).figures("uneven_auc_delta"),
        **median_figures("even_cost_share", [row["added_share"] for row in _rounds(rows, "equal")]),
        **median_figures("batch_changes_per_minute", changes),
        **median_figures("follow_s", followed),
    }


def follow_s(row: Row) -> float:
    """Seconds from the fall to the last change of a size by a tenth or more; 0: nothing has changed."""
    sizes = [[row["began"], *[GLOBAL_BATCH // WORKERS] * WORKERS], *row["sizes"]]
    large = [
        after[0]
        for before, after in pairwise(sizes)
        if any(abs(new - old) >= old / 10 for old, new in zip(before[1:], after[1:], strict=True))
    ]
    return max(0.0, *(float(at - row["fell"]) for at in large), 0.0)


def draw(result: Row, folder: Path) -> None:
    """Draw the rates with a slow worker and without, and the sizes after a worker has become slow."""
    rows = result["rows"]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    rates, sizes = figure.subplots(1, 2)
    bars = {
        f"one at 1/4 of a core, {kind}": [row["samples_per_s"] / 1000 for row in _rounds(rows, "slow", kind)]
        for kind in KINDS
    }
    bars["both unlimited"] = [row["samples_per_s"] / 1000 for row in _rounds(rows, "equal")]
    median_bars(rates, bars, highlighted=[label for label in bars if label.endswith("dynamic")])
    rates.set_xlabel("thousand samples/s (bar: median; dots: rounds)")
    for row in _rounds(rows, "fall"):
        steps = [[row["began"], *[GLOBAL_BATCH // WORKERS] * WORKERS], *row["sizes"]]
        times = [each[0] - row["fell"] for each in steps]
        sizes.step(
            [*times, row["ended"] - row["fell"]], [*(each[-1] for each in steps), steps[-1][-1]], where="post"
        )
    sizes.axvline(0, color="black", linewidth=0.8)
    sizes.set_xlabel("seconds since the worker has 1/4 of a core")
    sizes.set_ylabel("its samples in a step")
    figure.suptitle("Two workers: batches by measured speed", fontsize=11)
    figure.savefig(folder / "uneven.png", dpi=110)
