"""One worker of the baseline in `experiments.recovery`: plain torchrun and `torch.distributed.checkpoint`.

A careful user of TorchRec has this without our project: after a failure torchrun starts all workers again,
and each loads its part of the newest checkpoint, tables and optimizer. The launcher sets
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which plain torchrun's restarts fail more often than not. The
checkpoint is ready, and tables are initialised once, in TorchRec's own way. With `"save": true` in the job,
which comes as JSON on the command line, the worker makes that checkpoint and ends.
"""
# ruff: noqa: PLC0415  # imports are what is timed

import json
import sys
from functools import partial
from itertools import count
from pathlib import Path

from experiments.recovery.timeline import mark


def main() -> int:
    """Train until the process is ended from outside, and record when it reached what."""
    request = json.loads(sys.argv[1])
    reached = partial(mark, Path(request["timeline"]))
    reached("started")
    import logging

    import torch
    import torch.distributed as dist

    from dlrm.launch.device import Ranks
    from dlrm.launch.malloc import keep_freed_memory
    from dlrm.training.build import start_process_group
    from experiments.checkpointing.baselines import DcpSave
    from experiments.checkpointing.job import TrainingJob, start_training

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    reached("imported")
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    reached("met")
    training = start_training(TrainingJob(**request["job"]), ranks, initialize=False)
    checkpoint = DcpSave(Path(request["saved"]), training.model)
    reached("built")
    if request["save"]:
        checkpoint.begin()
        dist.destroy_process_group()
        return 0
    checkpoint.load()
    reached("restored")
    for step in count():
        training.step()
        if step == 0:
            reached("stepped")
    raise AssertionError("training ends only from outside")


if __name__ == "__main__":
    raise SystemExit(main())
