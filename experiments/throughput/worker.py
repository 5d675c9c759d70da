"""Worker of one measurement of `experiments.throughput`."""

import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

from dlrm.config.recipe import load_config
from dlrm.config.schema import Config
from dlrm.launch.device import Ranks
from dlrm.launch.stop_signal import StopSignal
from dlrm.training.build import build
from experiments.harness.worker_process import job_from, worker_process_group, write_measured
from experiments.harness.workload import Setting, TimedBatches, Workload, inputs_of
from experiments.throughput.breakdown import breakdown_ms
from experiments.throughput.torchrec_training import TorchRecTraining


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one setting."""
    job = job_from(arguments)
    setting, workload = Setting(**job["setting"]), Workload(**job["workload"])
    with worker_process_group(keeps_memory=setting.trainer == "ours" or setting.keeps_memory) as ranks:
        measured = _measure(setting, workload, ranks, profiled=job["profiled"])
    write_measured(job, ranks, measured)
    return 0


def _measure(setting: Setting, workload: Workload, ranks: Ranks, profiled: bool) -> dict[str, Any]:
    """Train and return the median step of `setting`, with its breakdown if profiled."""
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
            "sharding.strategy": "torchrec",  # the planner of the other side
            # which recipes differ in, and TorchRec's side has SGD
            "tables.optimizer": "sgd",
            "dense.optimizer": "sgd",
            "schedule.warmup_steps": 0,
        }
        config = load_config(workload.recipe, [f"{name}={value}" for name, value in overrides.items()])
        if setting.trainer == "ours":
            _train_ours(config, workload, ranks, batches)
        else:
            rival = TorchRecTraining(config, workload.features, batches.config.batch_size)
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
    """Train with the whole training loop of `dlrm.train`, metrics included, on batches in memory."""
    last = TimedBatches(workload, steps=1, rank=ranks.rank, world_size=ranks.world_size)
    inputs = inputs_of(config, workload.recipe, ranks, workload.features, batches, last)
    with StopSignal() as stop:
        trainer = build(inputs, stop)
        try:
            trainer.train()
        finally:
            trainer.session.close()
            trainer.telemetry.close()


if __name__ == "__main__":
    raise SystemExit(main())
