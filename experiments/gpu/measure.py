"""Runs the parts of `experiments.gpu`, and makes figures of what they measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Final

import torch

from experiments.gpu.parts import OURS, PARTS, Check
from experiments.gpu.worker import TORCHREC
from experiments.harness.record import Record, Row
from experiments.harness.statistics import median_figures
from experiments.harness.workload import Workload

QUICK: Final = Check(
    workload=Workload(rows=2000, global_batch_size=256, warm_up_steps=3, steps=5),
    compared_steps=4,
    tiny_steps=18,
    rounds=1,
    quick=True,
)
RECOVERIES: Final = ("kill", "copy_out")
COMPARED: Final = ("tiny", "terabyte")


def measure(part: str | None, quick: bool) -> int:
    """Run one part, or all (None), and store the result; returns 1 if a part failed."""
    check = QUICK if quick else Check()
    record = Record(
        "gpu" if part is None else f"gpu_{part}",
        asdict(check) | {"gpu": torch.cuda.get_device_name()},
        seeds=[check.workload.seed],
        quick=quick or part is not None,
        module="gpu",
    )
    return run(record, check, list(PARTS) if part is None else [part])


def run(record: Record, check: Check, names: Iterable[str]) -> int:
    """Run parts, store what they measured, and return the exit status."""
    failed: dict[str, str] = {}
    for name in names:
        try:
            record.measure(name, lambda name=name: PARTS[name].run(check))  # type: ignore[misc]
            print(f"{name}: ok", flush=True)
        except Exception as error:  # whatever it is: the other parts run
            failed[name] = f"{type(error).__name__}: {error}"
            print(f"{name}: FAILED: {failed[name]}", flush=True)
    figures, notes = figures_of(record.rows, failed)
    record.publish(figures, None, notes)
    return 1 if failed else 0


def figures_of(
    rows: Sequence[Row], failed: Mapping[str, str]
) -> tuple[dict[str, float | None], dict[str, str]]:
    """All figures of the parts that ran, and the reasons of those that failed."""
    measured = {row["key"]: row for row in rows}
    figures: dict[str, float | None] = {}
    errors = {name: measured[name]["loss_error"] for name in COMPARED if name in measured}
    figures |= {f"gpu_loss_error_{name}": error for name, error in errors.items()}
    if errors:
        figures["gpu_loss_error"] = max(errors.values())
    if "speed" in measured:
        rates = measured["speed"]["samples_per_s"]
        ours = [max(of_round) for of_round in zip(*(rates[name] for name in OURS), strict=True)]
        figures["gpu_samples_per_s"] = median(ours)
        figures |= median_figures("gpu_ratio_to_torchrec", _ratios(ours, rates[TORCHREC]))
        figures |= median_figures("gpu_prefetch_speedup", _ratios(rates["prefetch"], rates["none"]))
    figures |= {f"gpu_{name}_recovered": 1.0 for name in RECOVERIES if name in measured}
    missing: dict[str, list[str]] = {
        "speed": ["gpu_samples_per_s", "gpu_ratio_to_torchrec", "gpu_prefetch_speedup"],
        **{name: ["gpu_loss_error", f"gpu_loss_error_{name}"] for name in COMPARED},
    }
    notes = {figure: why for name, why in failed.items() for figure in missing.get(name, ())}
    figures |= dict.fromkeys(notes)
    for name in failed.keys() & set(RECOVERIES):
        figures[f"gpu_{name}_recovered"] = 0.0
        notes[f"gpu_{name}_recovered"] = failed[name]
    return figures, notes


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]
