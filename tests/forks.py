"""Processes that start as forks of one that has imported torch and TorchRec: seconds less for each.

That one is Python's fork server; a run of pytest has one, as soon as a test needs it. It has a
single thread: a fork of pytest itself may inherit a lock that another of its threads was holding,
and hang for ever.
"""

import multiprocessing
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext

IMPORTED_ONCE = ["torchrec.distributed.model_parallel", "pyarrow.parquet", "torch.distributed.checkpoint"]


def context(imported: Sequence[str] = IMPORTED_ONCE) -> ForkServerContext:
    """For `multiprocessing`, in place of its context "spawn".

    `imported`: modules that the server imports before its first fork, if it has not begun yet.
    """
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(list(imported))
    return made
