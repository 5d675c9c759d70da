"""One worker of ours in `experiments.recovery`: the rival's training under `cpr.PartialRecovery`.

It is started by the plain command, without any setting for torchrun's store. The job comes as JSON on the
command line.
"""
# ruff: noqa: PLC0415  # imports are what is timed

import json
import sys
from itertools import count
from pathlib import Path
from typing import Any

from cpr import forkserver as standby
from experiments.recovery.timeline import Timeline


def prepare() -> None:
    """Import what `work` needs."""
    import cpr.session
    import experiments.checkpointing.job

    assert cpr.session, experiments.checkpointing.job


def work() -> int:
    """Train until somebody ends it, and note when this process reached what."""
    request, timeline = asked()
    import logging

    from cpr.session import PartialRecovery
    from dlrm.launch.device import Ranks
    from dlrm.launch.malloc import keep_freed_memory
    from experiments.checkpointing.job import Job, start_training

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    timeline.mark("imported")
    recovery = PartialRecovery(request["saved"])
    with recovery:
        recovery.init_process_group("gloo")
        timeline.mark("met")
        with recovery.building():
            training = start_training(Job(**request["job"]), Ranks.from_environment(), initialize=False)
        timeline.mark("built")
        recovery.restore(training.model, states={"optimizers": training.optimizers})
        timeline.mark("restored")
        for step in count():
            training.step()
            recovery.step(request["job"]["global_batch_size"])
            if step == 0:
                timeline.mark("stepped")
    raise AssertionError("somebody ends it before")


def asked() -> tuple[dict[str, Any], Timeline]:
    """The request of this process, and the timeline that it names."""
    request = json.loads(sys.argv[1])
    return request, Timeline(Path(request["timeline"]))


def main() -> int:
    """Begin the timeline; work here, or in a fork of a prepared process."""
    _, timeline = asked()
    timeline.mark("started")
    return standby.run(prepare, work)


if __name__ == "__main__":
    raise SystemExit(main())
