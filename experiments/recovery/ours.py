"""One worker under `cpr.PartialRecovery` in `experiments.recovery`: the same training as the baseline's.

The plain torchrun command starts the worker, without any setting for torchrun's store. The job comes as JSON
on the command line.
"""
# ruff: noqa: PLC0415  # imports are what is timed

import json
import sys
from functools import partial
from itertools import count
from pathlib import Path

from cpr import forkserver
from experiments.recovery.timeline import mark


def prepare() -> None:
    """Import what `work` needs, once for all forks."""
    import cpr.session
    import experiments.recovery.costs

    assert cpr.session, experiments.recovery.costs


def work() -> int:
    """Train until the process is ended from outside, and record when it reached what."""
    request = json.loads(sys.argv[1])
    reached = partial(mark, Path(request["timeline"]))
    import logging

    from cpr.session import PartialRecovery
    from dlrm.launch.device import Ranks
    from dlrm.launch.malloc import keep_freed_memory
    from dlrm.sharding.tables import initialize_tables
    from experiments.checkpointing.job import TrainingJob, start_training
    from experiments.recovery.costs import of_ours

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    reached("imported")
    job, saved = TrainingJob(**request["job"]), Path(request["saved"])
    recovery = PartialRecovery(str(saved))
    with recovery:
        recovery.init_process_group("gloo")
        reached("met")
        with recovery.building():
            training = start_training(job, Ranks.from_environment(), initialize=False)
        reached("built")
        recovery.restore(
            training.model,
            states={"optimizers": training.optimizers},
            initialize=lambda _: initialize_tables(training.model, job.seed),
        )
        reached("restored")
        for step in count():
            training.step()
            recovery.step(job.global_batch_size)
            if step == 0:
                reached("stepped", memory=str(recovery.memory_folder))
                if request["measures"] and not recovery.recoveries[1:]:
                    scratch = saved.with_name(f"{saved.name}-measured")
                    reached("measured", **of_ours(training, job, recovery.save_now, scratch))
    raise AssertionError("training ends only from outside")


if __name__ == "__main__":
    mark(Path(json.loads(sys.argv[1])["timeline"]), "started")
    raise SystemExit(forkserver.run(prepare, work))
