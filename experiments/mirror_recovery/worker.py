"""The worker of a node in `experiments.mirror_recovery`; the job comes as JSON on the command line."""
# ruff: noqa: PLC0415  # torch: not before the fork server is asked

import json
import sys
from functools import partial
from pathlib import Path
from typing import Final

from cpr import forkserver
from experiments.recovery.timeline import mark

STEPS_BEFORE_SAVE: Final = 20
MOMENTS: Final = 4
"""Moments of a mirror before the node may be lost: it is whole, and can go back as far as ever."""
STORED: Final = (
    *("kind", "generation", "step", "save_step", "mirror_step"),
    *("bytes_read", "bytes_moved", "seconds"),
)
"""What is stored of a recovery's report."""


def prepare() -> None:
    """Import what `work` needs, once for all forks."""
    import cpr.session
    import experiments.checkpointing.job

    assert cpr.session, experiments.checkpointing.job


def work() -> int:
    """Train and save once; then train until the process is ended from outside."""
    request = json.loads(sys.argv[1])
    import logging

    from cpr.mirror.config import MirrorConfig
    from cpr.session import PartialRecovery
    from dlrm.launch.device import Ranks
    from dlrm.launch.malloc import keep_freed_memory
    from experiments.checkpointing.job import TrainingJob, start_training

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    job = TrainingJob(**request["job"])
    with PartialRecovery(request["saved"], mirror=MirrorConfig(to=request["mirror"])) as recovery:
        recovery.init_process_group("gloo")
        group = recovery.worker_group
        reached = partial(mark, Path(request["timeline"]), rank=group.rank, generation=group.generation)
        reached("met")
        with recovery.building():
            training = start_training(job, Ranks.from_environment(), initialize=not group.continues)
        reached("built")
        recovery.restore(training.model, states={"optimizers": training.optimizers})
        reached("restored")

        def step() -> None:
            training.step()
            recovery.step(job.global_batch_size)

        step()
        report = recovery.recoveries[-1].to_dict()
        reached("stepped", report={name: report[name] for name in STORED})
        for _ in range(STEPS_BEFORE_SAVE):
            step()
        recovery.save_now()
        while recovery.mirror is not None and recovery.mirror.moments < MOMENTS:
            step()
        reached("ready")
        while True:
            step()


if __name__ == "__main__":
    raise SystemExit(forkserver.run(prepare, work))
