"""Checks of sums over ranks and of SelSync in a real process group."""

import math

import pytest
import torch
import torch.distributed as dist

from dlrm.comm.controllers import SelSync, SumOverRanks, averaged_state
from tests.system.comm.common import assert_same_value

CPU = torch.device("cpu")


def check_sums_have_the_same_bits():
    """Added in another order these would differ, and in fp32 they would be lost."""
    agree, rank = SumOverRanks(CPU), dist.get_rank()
    mine = [0.1 * 7**rank, 1e8 + rank, math.nan if rank == 1 else 0.0]
    first, second, third = agree(torch.tensor(mine, dtype=torch.float64))
    assert agree.num_ranks == dist.get_world_size()
    assert second == sum(1e8 + other for other in range(agree.num_ranks))
    assert math.isnan(third)
    assert_same_value(first.hex())


def check_selsync_averages_when_one_rank_asks():
    """Delta 0 equals bulk-synchronous training."""
    nothing = torch.zeros(0)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    weight, expected = (torch.nn.Parameter(torch.zeros(4)) for _ in range(2))
    optimizer, whole = (momentum_of(parameter) for parameter in (weight, expected))
    sync = SelSync(agree=SumOverRanks(CPU), delta=0)
    for step in range(100):
        weight.grad = torch.full((4,), float(step % 10 + rank))
        expected.grad = torch.full((4,), step % 10 + (num_ranks - 1) / 2)
        assert sync.should_sync(weight.grad.norm(), nothing)[0]
        optimizer.step()
        whole.step()
        sync.average([weight], averaged_state(optimizer))
        assert_same_value(weight.tolist())
    torch.testing.assert_close(weight, expected)
    selective = SelSync(agree=SumOverRanks(CPU), delta=0.5)
    wishes = [1.0, 1.0, 50.0 if rank == 1 else 1.0]
    assert [selective.should_sync(norm, nothing)[0] for norm in wishes] == [False, False, True]
    with pytest.raises(ValueError, match="leave out shards"):
        selective.average([torch.zeros(5 + rank)])


def momentum_of(parameter):
    return torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
