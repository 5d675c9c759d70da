"""Processes that start as forks of one that has imported torch and TorchRec: seconds less for each.

That one is Python's fork server; a run of pytest has one, as soon as a test needs it.
"""

import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED_ONCE = ["torchrec.distributed.model_parallel", "pyarrow.parquet", "torch.distributed.checkpoint"]


def context() -> ForkServerContext:
    """For `multiprocessing`, in place of its context "spawn"."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(IMPORTED_ONCE)
    return made
