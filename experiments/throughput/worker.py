"""One worker of one measurement of `experiments.throughput`; started by torchrun, not by people.

Reads its job as JSON from the command line; rank 0 writes what it measured as JSON to the job's `out`.
"""

import json
import logging
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from data.loader import DataLoader
from dlrm.config.recipe import load_config
from dlrm.config.schema import Config
from dlrm.launch.device import Ranks
from dlrm.launch.malloc import keep_freed_memory
from dlrm.launch.stop_signal import StopSignal
from dlrm.training.build import build, start_process_group
from dlrm.training.data import Inputs
from experiments.harness.workload import Setting, TimedBatches, Workload
from experiments.throughput.breakdown import breakdown_ms
from experiments.throughput.torchrec_dlrm import Rival


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and let rank 0 tell."""
    job = json.loads((sys.argv[1:] if arguments is None else arguments)[0])
    setting, workload = Setting(**job["setting"]), Workload(**job["workload"])
    logging.getLogger("torchrec").setLevel(logging.ERROR)
    if setting.trainer == "ours" or setting.keeps_memory:
        keep_freed_memory()
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    measured = _measure(setting, workload, ranks, profiled=job["profiled"])
    dist.destroy_process_group()
    if ranks.rank == 0:
        Path(job["out"]).write_text(json.dumps(measured))
    return 0


def _measure(setting: Setting, workload: Workload, ranks: Ranks, profiled: bool) -> dict[str, Any]:
    """The median step of `setting`, or where its time goes."""
    profiler = _profiler(workload) if profiled else None
    batches = TimedBatches(
        workload,
        steps=workload.warm_up_steps + workload.steps,
        rank=ranks.rank,
        world_size=ranks.world_size,
        after_step=profiler.step if profiler else lambda: None,
    )
    with tempfile.TemporaryDirectory() as scratch, profiler or nullcontext():
        overrides = {
            "train.device": "cpu",
            "train.precision": setting.precision,
            "train.max_steps": len(batches),
            "train.run_folder": scratch,
            "data.global_batch_size": workload.global_batch_size,
            "sharding.strategy": "torchrec",  # as the rival's
        }
        config = load_config(workload.recipe, [f"{name}={value}" for name, value in overrides.items()])
        if setting.trainer == "ours":
            _train_ours(config, workload, ranks, batches)
        else:
            rival = Rival(config, workload.features, batches.config.batch_size)
            (rival.train_pipelined if setting.pipelined else rival.train)(batches)
    step_s = median(batches.took_s[workload.warm_up_steps :])
    measured: dict[str, Any] = {
        "step_s": step_s,
        "samples_per_s": workload.global_batch_size / step_s,
    }
    if profiler:
        events = profiler.events()  # type: ignore[no-untyped-call]
        measured["breakdown_ms"] = breakdown_ms(events)
    return measured


def _profiler(workload: Workload) -> profile:
    return profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=workload.warm_up_steps, active=workload.steps, repeat=1),
    )


def _train_ours(config: Config, workload: Workload, ranks: Ranks, batches: TimedBatches) -> None:
    """Our whole training loop as it is, metrics and all, on batches that are ready."""
    last = TimedBatches(workload, steps=1, rank=ranks.rank, world_size=ranks.world_size)
    inputs = Inputs(
        config=config,
        recipe=workload.recipe,
        ranks=ranks,
        device=torch.device("cpu"),
        manifest=batches.manifest,
        loader=cast("DataLoader", batches),
        test_loader=cast("DataLoader", last),
        source=None,
        ids={},
    )
    with StopSignal() as stop:
        trainer = build(inputs, stop)
        try:
            trainer.train()
        finally:
            trainer.session.close()
            trainer.telemetry.close()


if __name__ == "__main__":
    raise SystemExit(main())
