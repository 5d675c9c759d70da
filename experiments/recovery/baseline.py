"""One worker of the baseline in `experiments.recovery`: plain torchrun and `torch.distributed.checkpoint`.

A careful user of TorchRec has this without our project: after a failure torchrun starts all workers again,
and each loads its part of the newest checkpoint, tables and optimizer. The launcher sets
`TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1`, without which plain torchrun's restarts fail more often than not. A
worker without a checkpoint makes it after its first step, and measures what that and a step cost. Tables are
initialised once, in TorchRec's own way. The job comes as JSON on the command line.
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
    from contextlib import nullcontext
    from unittest.mock import patch

    import torch

    from dlrm.launch.device import Ranks
    from dlrm.launch.malloc import keep_freed_memory
    from dlrm.training.build import start_process_group
    from experiments.checkpointing.baselines import DcpSave
    from experiments.checkpointing.job import TrainingJob, start_training
    from experiments.recovery.costs import of_rival

    logging.getLogger("torchrec").setLevel(logging.ERROR)
    keep_freed_memory()
    reached("imported")
    ranks = Ranks.from_environment()
    start_process_group(ranks, torch.device("cpu"))
    reached("met")
    job = TrainingJob(**request["job"])
    with patch("dlrm.training.model.uninitialized_tables", nullcontext):  # with TorchRec's initial values
        training = start_training(job, ranks, initialize=False)
    checkpoint = DcpSave(Path(request["saved"]), training.model)
    reached("built")
    is_saved = checkpoint.folder.exists()
    if is_saved:
        checkpoint.load()
    reached("restored")
    for step in count():
        training.step()
        if step == 0:
            reached("stepped", memory=None)
            if not is_saved:
                reached("measured", **of_rival(training, job, checkpoint))
    raise AssertionError("training ends only from outside")


if __name__ == "__main__":
    raise SystemExit(main())
