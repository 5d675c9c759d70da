"""What training and saving cost in a run of `experiments.growth`, as its workers measure it themselves."""

import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final

import torch.distributed as dist

from cpr.priority import Prioritizer, PriorityConfig
from cpr.shards import find_shards
from dlrm.launch.device import Ranks
from dlrm.training.model import unsharded
from experiments.checkpointing.baselines import Saver
from experiments.checkpointing.bench import Bench, across
from experiments.checkpointing.job import TrainingJob, training_inputs
from experiments.checkpointing.ours import (
    OurRowSave,
    OurSave,
    checkpointer_at,
    random_rows,
    shard_bytes,
)
from experiments.harness.memory import peak_bytes
from experiments.harness.training import Training

WARM_UP_STEPS: Final = 5
SAVED: Final = ("blocked_s", "committed_s", "lost_s", "bytes")
"""What is kept of the measurement of a save (`Bench.measure`)."""

Costs = dict[str, Any]


def of_ours(training: Training, job: TrainingJob, save: Callable[[], object], scratch: Path) -> Costs:
    """Costs under CPR: of a step, of MFU's counting, of a rolling save and of a row save.

    `save` makes a save of the run. Those that are timed are not the run's, which has not counted the steps
    that are trained meanwhile, and take memory of their own.
    """
    found = _of_training(training, job)
    save()
    found["peak_bytes"] = peak_bytes()
    checkpointer = checkpointer_at(scratch, training.model, job.ceiling_bytes)
    rows = random_rows(find_shards(training.model), job.row_share, job.seed)
    found["track_s"] = _tracking_s(training, job.steps_before)
    found |= _of_saver(training, job, scratch, "save", lambda: OurSave(scratch, checkpointer, "rolling"))
    found |= _of_saver(training, job, scratch, "row_save", lambda: OurRowSave(scratch, checkpointer, rows))
    checkpointer.close()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(scratch)
    return found


def of_rival(training: Training, job: TrainingJob, saver: Saver) -> Costs:
    """Costs under TorchRec and DCP: of a step and of a save, for which training waits."""
    found = _of_training(training, job)
    found |= _of_saver(training, job, saver.folder.parent, "save", lambda: saver)
    return found | {"peak_bytes": peak_bytes()}


def _of_training(training: Training, job: TrainingJob) -> Costs:
    ranks = Ranks.from_environment()
    inputs = training_inputs(job, ranks)
    began = perf_counter()
    unsharded(inputs)
    plan_s = perf_counter() - began
    training.timed_steps(WARM_UP_STEPS)
    return {
        "plan_s": across([plan_s])[0],
        "step_s": median(training.timed_steps(job.steps_before)),
        "trained_bytes": peak_bytes(),
        "table_bytes": shard_bytes(find_shards(training.model)),
    }


def _of_saver(
    training: Training, job: TrainingJob, scratch: Path, name: str, make: Callable[[], Saver]
) -> Costs:
    measured = Bench(job, training, scratch, Ranks.from_environment().rank).measure(name, make)
    return {f"{name}_{what}": measured[what] for what in SAVED}


def _tracking_s(training: Training, steps: int) -> float:
    """Seconds a step that MFU's counting takes."""
    took_s: list[float] = []

    def timed(see: Callable[[Any], None]) -> Callable[[Any], None]:
        def seen(lookups: Any) -> None:
            began = perf_counter()
            see(lookups)
            took_s.append(perf_counter() - began)

        return seen

    with Prioritizer(training.model, PriorityConfig(scheme="mfu")) as prioritizer:
        for tracker in prioritizer._seen_by:
            tracker.see = timed(tracker.see)  # type: ignore[method-assign, assignment]
        training.timed_steps(WARM_UP_STEPS)
        took_s.clear()
        training.timed_steps(steps)
    return sum(took_s) / steps
