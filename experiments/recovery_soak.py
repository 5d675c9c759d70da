"""Half an hour of training, a failure about every minute: `python -m experiments.recovery_soak [--quick]`.

The `tiny` recipe on two nodes of this machine, two workers each, every node a `cpr run` with its torchrun.
The data set is as large as half an hour of training needs, measured first. Then the run is done twice, at the
same time: undisturbed, and with failures at seeded random moments, all kinds mixed: workers killed with and
without their memory, agents killed with and without their workers, whole nodes lost, hangs that pass and
hangs that do not, exceptions in a step, slow workers, damaged checkpoint files, storage that fails.
Interrupted, the command begins the two again. Figures:

- `soak_failures`: failures that happened.
- `soak_auc_delta`: AUC on the test day after the disturbed run, minus that after the undisturbed one.
- `soak_pls`: portion of lost samples of the disturbed run, as it reports it itself.
- `soak_leftovers`: processes, files in shared memory and temporary files that it left behind.
- `soak_minutes`, `soak_minutes_undisturbed`: from start to end; `soak_recoveries`: restarts of the workers.
"""

import argparse
import json
import shutil
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from cpr.faults import (
    AtRate,
    DamageFile,
    Deed,
    Hang,
    KillAgent,
    Killer,
    KillWorker,
    Kind,
    LoseNode,
    Plan,
    Raise,
    Slow,
    StorageError,
)
from data.synthetic import SyntheticConfig, generate
from experiments.record import QUICK, Record, Row
from experiments.recovery_run import NodesRun

WORKERS_PER_NODE: Final = 2
DAYS: Final = 20
"""The last is the test day."""
DISTURBED_SHARE: Final = 0.4
"""Of the machine's training speed that the disturbed run is expected to reach: half of the machine, less its
downtime."""
PATIENCE: Final = 4
"""A run that takes so many times as long as it should has failed."""
COLLECTIVE_TIMEOUT_S: Final = 30.0
OUTSIDE: Final[tuple[Kind, ...]] = (
    KillWorker(),
    KillWorker(),
    KillWorker(wipe=True),
    KillAgent(),
    KillAgent(workers=False),
    LoseNode(),
    Hang(duration_s=5.0),
    Hang(duration_s=300.0),
    DamageFile(),
)
INSIDE: Final[tuple[Kind, ...]] = (
    Raise(),
    KillWorker(),
    Slow(num_steps=50, factor=3.0),
    StorageError(),
)
INSIDE_SHARE: Final = 0.25
"""Of the failures that workers do to themselves; the others come from outside."""
SCRATCH: Final = Path("runs") / "recovery-soak"
"""Data set, runs and their checkpoints, up to 3 GB, under the current folder; deleted at the end."""


@dataclass(frozen=True, kw_only=True)
class Soak:
    """How long, and how rough."""

    minutes: float = 30.0
    """Of the disturbed run, about."""
    mean_s: float = 60.0
    """Between failures."""
    global_batch_size: int = 512
    save_every_s: float = 20.0
    """About; in steps of the undisturbed pace."""
    seed: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both runs and store what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="a small run, which overwrites no stored result")
    parser.add_argument("--minutes", type=float, default=Soak.minutes, help=f"default {Soak.minutes:g}")
    options = parser.parse_args(arguments)
    soak = Soak(minutes=options.minutes)
    if options.quick:
        soak = Soak(minutes=0.7, mean_s=12.0, save_every_s=3.0)
    record = Record("recovery_soak", asdict(soak), seeds=[soak.seed], quick=options.quick)
    scratch = QUICK / "recovery-soak" if options.quick else SCRATCH
    shutil.rmtree(scratch, ignore_errors=True)  # of a run that was killed
    try:
        pace = record.measure("pace", partial(_pace, scratch / "pace"))["samples_per_s"]
        dataset = _dataset(soak, pace, scratch / "dataset")
        runs = {"undisturbed": _undisturbed, "disturbed": _disturbed}
        with ThreadPoolExecutor(len(runs)) as pool:
            both = {key: pool.submit(run, soak, pace, dataset, scratch) for key, run in runs.items()}
            calm, rough = (record.measure(key, run.result) for key, run in both.items())
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    path = record.finish(
        {
            "soak_failures": len([deed for deed in rough["failures"] if deed["happened"]]),
            "soak_auc_delta": rough["auc"] - calm["auc"],
            "soak_pls": rough["pls"],
            "soak_leftovers": sum(rough["leftovers"].values()),
            "soak_recoveries": len(rough["recoveries"]),
            "soak_minutes": rough["minutes"],
            "soak_minutes_undisturbed": calm["minutes"],
        }
    )
    print(f"stored in {path}")
    return 0


def _dataset(soak: Soak, pace: float, folder: Path) -> Path:
    """Data for the whole run at `pace`, samples/s."""
    rows = int(soak.minutes * 60 * DISTURBED_SHARE * pace / (DAYS - 1))
    generate(SyntheticConfig(days=DAYS, rows_per_day=max(rows, 1000)), folder, processes=2)
    return folder


def _arguments(soak: Soak, pace: float, dataset: Path) -> list[str]:
    every = max(10, round(soak.save_every_s * pace / soak.global_batch_size))
    return [
        "--recipe",
        "tiny",
        "--set",
        f"data.uri={dataset.absolute()}",
        f"data.global_batch_size={soak.global_batch_size}",
        "train.device=cpu",
        "train.evaluate_every_steps=0",
        f"checkpoint.every_steps={every}",
        f"recovery.timeout_s={COLLECTIVE_TIMEOUT_S}",
    ]


def _pace(scratch: Path) -> Row:
    """Samples/s of an undisturbed run."""
    generate(SyntheticConfig(days=2, rows_per_day=200_000), scratch / "dataset", processes=2)
    arguments = _arguments(Soak(), Soak.global_batch_size * 20, scratch / "dataset")
    with NodesRun(scratch / "run", arguments, WORKERS_PER_NODE) as run:
        return {"samples_per_s": run.wait(600)["samples_per_s"]}


def _undisturbed(soak: Soak, pace: float, dataset: Path, scratch: Path) -> Row:
    arguments = _arguments(soak, pace, dataset)
    began = time.monotonic()
    with NodesRun(scratch / "undisturbed", arguments, WORKERS_PER_NODE) as run:
        report = run.wait(PATIENCE * soak.minutes * 60)
        return _outcome(report, began) | {"leftovers": asdict(run.leftovers())}


def _disturbed(soak: Soak, pace: float, dataset: Path, scratch: Path) -> Row:
    arguments = _arguments(soak, pace, dataset)
    inside = AtRate(mean_s=soak.mean_s / INSIDE_SHARE, seed=soak.seed, kinds=INSIDE)
    outside = AtRate(mean_s=soak.mean_s / (1 - INSIDE_SHARE), seed=soak.seed + 1, kinds=OUTSIDE)
    plan = scratch / "faults.json"
    plan.write_text(json.dumps(Plan(schedules=(inside,)).to_json()))
    began = time.monotonic()
    with NodesRun(scratch / "disturbed", arguments, WORKERS_PER_NODE, plan) as run:
        checkpoint = run.wait_for_folder() / "checkpoint"
        with Killer(Plan(schedules=(outside,)), nodes=run.nodes, checkpoint=checkpoint) as killer:
            report = run.wait(PATIENCE * soak.minutes * 60)
        failures = [_told(deed) for deed in killer.deeds] + _injected(run.run_folder)
        return _outcome(report, began) | {"failures": failures, "leftovers": asdict(run.leftovers())}


def _outcome(report: dict[str, Any], began: float) -> Row:
    failures = report["failures"]
    return {
        "auc": report["metrics"]["auc"],
        "best_auc": report["best_auc"],
        "steps": report["steps"],
        "samples": report["samples"],
        "pls": failures["pls"],
        "recoveries": [
            {name: each[name] for name in ("kind", "reason", "step", "pls_added", "seconds")}
            for each in failures["recoveries"]
        ],
        "minutes": (time.monotonic() - began) / 60,
    }


def _told(deed: Deed) -> Row:
    """A failure from outside; what hit nobody has neither processes nor a file that changed."""
    happened = not deed.note.startswith(("missed", "failed"))
    return {"kind": deed.kind.name, "after_s": deed.after_s, "happened": happened, "note": deed.note}


def _injected(folder: Path) -> list[Row]:
    """Failures that workers did to themselves, from their own record."""
    lines = [
        line for path in folder.glob("checkpoint/faults-*.jsonl") for line in path.read_text().splitlines()
    ]
    claimed = [json.loads(line) for line in lines]
    return [
        {"kind": each["kind"]["kind"], "step": each["step"], "happened": True, "note": ""}
        for each in claimed
        if "kind" in each
    ]


if __name__ == "__main__":
    raise SystemExit(main())
