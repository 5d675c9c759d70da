"""Two ranks, one of which hangs."""

import os
import signal
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import nn

from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from tests import forks

SAFETY_NET_S = 60


def work(rank, folder, pipe):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    config = CheckpointConfig(uri=f"{folder}/checkpoint")
    checkpointer = Checkpointer(nn.Linear(2, 2), config, timeout=timedelta(seconds=0.5))
    checkpointer.prepare()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        checkpointer.save()
    except RuntimeError as error:
        pipe.send(str(error))
    signal.pause()


@pytest.mark.system
@pytest.mark.timeout(2 * SAFETY_NET_S)
def test_a_save_times_out_if_one_rank_hangs(tmp_path):
    context = forks.context()
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=work, args=(rank, tmp_path, theirs), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    try:
        assert ours.poll(SAFETY_NET_S), "rank 0 waits on"
        assert "Timed out waiting 500ms" in ours.recv()
    finally:
        for each in ranks:
            each.kill()
            each.join()
