"""An error of one rank fails its test at once, with its output."""

import os
import signal

import pytest
import torch
import torch.distributed as dist


def fail_alone(how):
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("what went wrong")
    dist.all_reduce(torch.ones(1))


@pytest.mark.system
@pytest.mark.parametrize(("how", "told"), [("raises", "ValueError: what went wrong"), ("killed", "code -9")])
def test_an_error_of_one_rank_fails_the_test(start_ranks, how, told):
    ranks = start_ranks(fail_alone, how, world_size=2)
    with pytest.raises(AssertionError, match=told):
        ranks.wait(timeout_s=60)
