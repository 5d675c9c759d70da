"""One worker of the rival in `experiments.recovery`: plain torchrun and `torch.distributed.checkpoint`.

What a careful user of TorchRec has without this project: after a failure torchrun starts all workers again,
and each loads its part of the newest checkpoint, tables and optimizer. It is started with
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which its restarts fail more often than not, finds the
checkpoint ready, and does not initialise its tables a second time beside TorchRec's own way. With `"save":
true` it makes that checkpoint and ends. The job comes as JSON on the command line.
"""
# ruff: noqa: PLC0415  # imports are what is timed

import json
import sys
from itertools import count
from pathlib import Path

from experiments.recovery.timeline import Timeline


def main() -> int:
    """Train until somebody ends it, and note when this process reached what."""
    request = json.loads(sys.argv[1])
    timeline = Timeline(Path(request["timeline"]))
    timeline.mark("started")
    import logging

    import torch
    import torch.distributed as dist

    from dlrm.launch.device import Ranks
    from dlrm.launch.malloc import keep_freed_memory
    from dlrm.training.build import start_process_group
    from experiments.checkpointing.baselines import DcpSave
    from experiments.checkpointing.job import Job, start_training

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    timeline.mark("imported")
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    timeline.mark("met")
    training = start_training(Job(**request["job"]), ranks, initialize=False)
    checkpoint = DcpSave(Path(request["saved"]), training.model)
    timeline.mark("built")
    if request["save"]:
        checkpoint.begin()
        dist.destroy_process_group()
        return 0
    checkpoint.load()
    timeline.mark("restored")
    for step in count():
        training.step()
        if step == 0:
            timeline.mark("stepped")
    raise AssertionError("somebody ends it before")


if __name__ == "__main__":
    raise SystemExit(main())
