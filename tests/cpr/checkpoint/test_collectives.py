"""Two ranks, one of which hangs, or waits longer than the other before a save."""

import os
import signal
import time
from contextlib import contextmanager
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


def choose_rows(rank, folder, pipe):
    """Rank 1 takes long to choose rows."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with Checkpointer(nn.Linear(2, 2), CheckpointConfig(uri=f"{folder}/checkpoint")) as checkpointer:
        checkpointer.save()
        checkpointer.wait_until_idle()
        save = checkpointer.save_rows({}, began=time.perf_counter() - 100 * rank)
        checkpointer.wait_until_idle()
    if rank == 0:
        pipe.send((save.blocked_s, save.longest_blocked_s))


@contextmanager
def two_ranks(function, folder):
    """Runs it in two processes; what one of them says."""
    context = forks.context()
    ours, theirs = context.Pipe()
    ranks = [context.Process(target=function, args=(rank, folder, theirs), daemon=True) for rank in range(2)]
    for each in ranks:
        each.start()
    try:
        assert ours.poll(SAFETY_NET_S), "rank 0 waits on"
        yield ours.recv()
    finally:
        for each in ranks:
            each.kill()
            each.join()


@pytest.mark.system
@pytest.mark.timeout(2 * SAFETY_NET_S)
def test_a_save_times_out_if_one_rank_hangs(tmp_path):
    with two_ranks(work, tmp_path) as message:
        assert "Timed out waiting 500ms" in message


@pytest.mark.system
@pytest.mark.timeout(2 * SAFETY_NET_S)
def test_each_rank_learns_the_longest_blocked_time(tmp_path):
    with two_ranks(choose_rows, tmp_path) as (blocked_s, longest_blocked_s):
        assert blocked_s < 50
        assert longest_blocked_s > 100
