"""Whether the trainer works on a GPU, and how fast: `python -m experiments.gpu [--part NAME] [--quick]`.

It takes one GPU and at most eight minutes; without a GPU it says so and ends with status 1. Every part is
processes of its own with a time limit of its own: one that fails is reported, and the others run all the
same. `--part` runs one of them alone and stores its result in `runs/quick`.

- `tiny`: `dlrm.train --recipe tiny` in fp32, on the GPU and on the CPU.
- `terabyte`: steps of the recipe `terabyte` in fp32, on the GPU and on the CPU, from the same initial values.
- `speed`: `terabyte` in mixed precision with `train.pipeline=none` and `prefetch`, and TorchRec's DLRM under
  TrainPipelineSparseDist, in turns.
- `kill`: `tiny` saves, its worker is killed with -9 and restarted, and training ends as if it had not been.
- `copy_out`: the same with an exception and an abort, as by NCCL's watchdog, after which the GPU's tables are
  found in shared memory.

Figures:

- `gpu_samples_per_s`: samples/s of this trainer in `speed`, of the better pipeline in each round, the median.
- `gpu_ratio_to_torchrec`: the same over TorchRec's in that round, with `..._low` and `..._high`.
- `gpu_prefetch_speedup`: samples/s with `prefetch` over those with `none`, likewise. On one GPU nothing is
  exchanged: what is left of it is its cost.
- `gpu_loss_error`: the largest relative difference between a logged loss on the GPU and on the CPU, in `tiny`
  and `terabyte`; also `gpu_loss_error_tiny` and `gpu_loss_error_terabyte`.
- `gpu_kill_recovered`, `gpu_copy_out_recovered`: 1, or 0 if that part failed.

A figure whose part failed is missing, or 0, and its note says why; the command then ends with status 1.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Final

import torch

from experiments.gpu.parts import OURS, PARTS, Check
from experiments.gpu.worker import TORCHREC
from experiments.harness.command import experiment_parser, require_gpu
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts and store the result; returns 1 if a part failed."""
    parser = experiment_parser(__doc__)
    parser.add_argument("--part", choices=list(PARTS), help="run only this one; overwrites no stored result")
    options = parser.parse_args(arguments)
    require_gpu(parser)
    check = QUICK if options.quick else Check()
    names = list(PARTS) if options.part is None else [options.part]
    record = Record(
        "gpu" if options.part is None else f"gpu_{options.part}",
        asdict(check) | {"gpu": torch.cuda.get_device_name()},
        seeds=[check.workload.seed],
        quick=options.quick or options.part is not None,
        module="gpu",
    )
    return run(record, check, names)


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
