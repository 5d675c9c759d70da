"""The parts of `experiments.gpu`: each launches workers on the device, in a time limit of its own.

A part returns a row with what it measured, or raises an error that says what failed.
"""

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from cpr.faults.injector import ENVIRONMENT as FAULTS
from cpr.faults.injector import Plan
from cpr.faults.kinds import Abort, KillWorker, Kind, Raise
from cpr.faults.schedules import AtStep
from experiments.gpu.worker import TORCHREC, logged_losses
from experiments.harness.launch import measure_under_torchrun, running, torchrun_command
from experiments.harness.record import Row
from experiments.harness.samples import default_dataset
from experiments.harness.workload import Workload

WORKER: Final = "experiments.gpu.worker"
THREADS: Final = 2
OURS: Final = ("none", "prefetch")
"""This trainer, by its `train.pipeline`."""
STORED: Final = ("kind", "step", "save_step", "bytes_read", "seconds")
"""What is stored of a recovery's report."""
MOST_LOSS_ERROR: Final = 0.01
"""Largest relative difference between losses on two devices that may come from rounding."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """Device and sizes of the check."""

    device: str = "cuda"
    workload: Workload = Workload(rows=400_000, warm_up_steps=50, steps=300)  # noqa: RUF009  # frozen
    """Of `terabyte`: 26 tables of 64 columns, 2.7 GB."""
    compared_steps: int = 50
    """Steps of `terabyte` whose losses are compared."""
    tiny_steps: int = 400
    """Steps of each run of `tiny`."""
    rounds: int = 2
    """Turns of each trainer."""
    quick: bool = False
    """Whether `tiny` trains on few data."""


@dataclass(frozen=True)
class Deadline:
    """The time limit of a part, which its launches share."""

    limit_s: float
    started_s: float

    @property
    def left_s(self) -> float:
        """Seconds that the next launch may take; at least one, so that it fails by itself."""
        return max(1.0, self.limit_s - (time.monotonic() - self.started_s))


@dataclass(frozen=True)
class Part:
    """One part: its time limit, and what it does."""

    limit_s: float
    function: Callable[[Check, Deadline], Row]

    def run(self, check: Check) -> Row:
        """Measure.

        Raises:
            RuntimeError: a launch failed or took too long, or what was to hold does not.
        """
        return self.function(check, Deadline(self.limit_s, time.monotonic()))


def tiny(check: Check, deadline: Deadline) -> Row:
    """`dlrm.train --recipe tiny`, in fp32, on the device and on the CPU."""
    runs = {}
    for device in (check.device, "cpu"):
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
            folder = _train_tiny(check, deadline, Path(scratch), {"train.device": device})
            report = json.loads((folder / "report.json").read_text())
            runs[device] = {"losses": logged_losses(folder), "auc": report["metrics"]["auc"]}
    return {"auc": runs[check.device]["auc"], "auc_cpu": runs["cpu"]["auc"]} | _losses(
        runs[check.device]["losses"], runs["cpu"]["losses"]
    )


def terabyte(check: Check, deadline: Deadline) -> Row:
    """Steps of `terabyte` in fp32 on the device and on the CPU, from the same initial values."""
    workload = replace(check.workload, warm_up_steps=1, steps=check.compared_steps - 2)
    ours = {"trainer": "none", "precision": "fp32", "losses": True, "workload": asdict(workload)}
    found = [_measured(ours | {"device": device}, deadline)["losses"] for device in (check.device, "cpu")]
    return _losses(*found)


def speed(check: Check, deadline: Deadline) -> Row:
    """Samples/s of `terabyte` in mixed precision, of all trainers in turns."""
    job = {"precision": "bf16", "losses": False, "device": check.device, "workload": asdict(check.workload)}
    rates: dict[str, list[float]] = {}
    for number in range(check.rounds):
        for trainer in (*OURS, TORCHREC)[:: -1 if number % 2 else 1]:
            measured = _measured(job | {"trainer": trainer}, deadline)
            rates.setdefault(trainer, []).append(measured["samples_per_s"])
    return {"samples_per_s": rates}


def kill(check: Check, deadline: Deadline) -> Row:
    """`tiny` saves, its worker is killed with -9, restarted, and trains to the end."""
    return _recovered(check, deadline, KillWorker())


def copy_out(check: Check, deadline: Deadline) -> Row:
    """`tiny` fails by an exception and by an abort: its tables are copied out, and nothing is lost."""
    row = _recovered(check, deadline, Raise(), Abort())
    kinds = [recovery["kind"] for recovery in row["recoveries"]]
    if kinds != ["process", "process"]:
        raise RuntimeError(
            "a worker that fails by an exception, or by an abort, was to leave its tables in shared memory, "
            f"and the recoveries were of the kinds {' and '.join(kinds)}"
        )
    return row


PARTS: Final[Mapping[str, Part]] = {
    "tiny": Part(90, tiny),
    "terabyte": Part(90, terabyte),
    "speed": Part(160, speed),
    "kill": Part(65, kill),
    "copy_out": Part(75, copy_out),
}
"""By name; their limits add up to eight minutes."""


def _recovered(check: Check, deadline: Deadline, *failures: Kind) -> Row:
    """Train `tiny` with saves through failures, evenly spaced; returns what its report says.

    Raises:
        RuntimeError: there was not one recovery for each, or training did not come to its end.
    """
    every = check.tiny_steps // (len(failures) + 1)
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as scratch:
        plan = Path(scratch) / "faults.json"
        strikes = [
            AtStep(step=every * number + 1, kind=kind, target=0) for number, kind in enumerate(failures, 1)
        ]
        plan.write_text(json.dumps(Plan(schedules=tuple(strikes)).to_json()))
        settings = {"train.device": check.device, "checkpoint.every_steps": max(1, check.tiny_steps // 8)}
        folder = _train_tiny(
            check,
            deadline,
            Path(scratch) / "runs",
            settings,
            restarts=len(failures),
            environment={FAULTS: str(plan)},
        )
        report = json.loads((folder / "report.json").read_text())
    recoveries = report["failures"]["recoveries"]
    if report["steps"] != check.tiny_steps or len(recoveries) != len(failures):
        raise RuntimeError(
            f"the run was to do {check.tiny_steps} steps with {len(failures)} recoveries; it did "
            f"{report['steps']} with {len(recoveries)}"
        )
    kept = [{name: each[name] for name in STORED} for each in recoveries]
    return {"recoveries": kept, "pls": report["failures"]["pls"], "auc": report["metrics"]["auc"]}


def _train_tiny(
    check: Check,
    deadline: Deadline,
    runs: Path,
    settings: Mapping[str, Any],
    restarts: int = 0,
    environment: Mapping[str, str] | None = None,
) -> Path:
    """Run the trainer's command to its end; returns the run's folder."""
    settings = {
        "data.uri": json.dumps(str(default_dataset(check.quick).absolute())),
        "train.run_folder": json.dumps(str(runs)),
        "train.precision": "fp32",
        "train.epochs": 1000,
        "train.max_steps": check.tiny_steps,
        "train.evaluate_every_steps": 0,
        "train.log_every_steps": max(1, check.tiny_steps // 40),
        **settings,
    }
    arguments = ["--recipe", "tiny", "--set", *(f"{name}={value}" for name, value in settings.items())]
    command = torchrun_command("dlrm.train", arguments, processes=1, restarts=restarts)
    with running(command, threads=THREADS, environment=environment) as launch:
        launch.check_ended_well(deadline.left_s)
    (folder,) = runs.iterdir()
    return folder


def _measured(job: Row, deadline: Deadline) -> Row:
    return measure_under_torchrun(WORKER, job, processes=1, threads=THREADS, timeout_s=deadline.left_s)


def _losses(device: list[float], cpu: list[float]) -> Row:
    """Row of a comparison of losses.

    Raises:
        RuntimeError: they differ by more than rounding explains.
    """
    errors = [abs(ours / theirs - 1) for ours, theirs in zip(device, cpu, strict=True)]
    if not all(error <= MOST_LOSS_ERROR for error in errors):  # nor if one is NaN
        first = next(place for place, error in enumerate(errors) if not error <= MOST_LOSS_ERROR)
        raise RuntimeError(
            f"logged loss number {first + 1} is {device[first]}, and {cpu[first]} on the CPU; before it the "
            f"largest relative difference was {max(errors[:first], default=0.0):.2g}"
        )
    return {"loss_error": max(errors), "losses": device, "losses_cpu": cpu}
