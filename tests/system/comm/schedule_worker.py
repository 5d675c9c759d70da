"""Checks of P3 and of shared norms between three ranks that differ in speed and in the layers they use."""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

from dlrm.comm.p3 import scheduler as scheduling
from dlrm.comm.p3.scheduler import PriorityExchange
from dlrm.optim.norms import SharedNorms, choose_norms, divide, local_norms
from tests.system.comm.common import assert_same_bits, assert_same_value

STEPS = 30
SMALL = {"slice_values": 100, "fuse_values": 20}


class Net(nn.Module):
    """Rank 1 takes two layers in another order, and ranks leave out a third in some steps."""

    def __init__(self, rank):
        super().__init__()
        self.rank = rank
        self.first = nn.Linear(8, 16)
        self.left, self.right, self.extra = (nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 1)

    def forward(self, x, step):
        x = self.first(x).tanh()
        if self.rank == 1:
            right, left = self.right(x), self.left(x)
        else:
            left, right = self.left(x), self.right(x)
        x = (left + right).tanh()
        if (self.rank + step) % 3:
            x = x + self.extra(x).tanh()
        return self.last(x)


def make(rank):
    torch.manual_seed(1)
    return Net(rank)


def losses(model, rank):
    """The losses of all steps, on data of this rank."""
    generator = torch.Generator().manual_seed(rank)
    for step in range(STEPS):
        x = torch.randn(4, 8, generator=generator)
        yield step, (model(x, step) - x.sum(1, keepdim=True)).square().mean()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train_by_priority():
    """Train on ranks of different speed; returns the parameters and the order of slices."""
    rank = dist.get_rank()
    model = make(rank)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    with PriorityExchange(model, optimizer, **SMALL) as exchange:
        for step, loss in losses(model, rank):
            if step % 10 == rank:
                time.sleep(0.002)
            loss.backward()
            exchange.step()
        exchange.finish()
        assert_same_value(exchange.order)
        return flat(model), exchange.order


def train_plainly():
    rank = dist.get_rank()
    model = make(rank)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _, loss in losses(model, rank):
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
    return flat(model)


def check_priority():
    """Replicas stay equal, and results do not depend on the order of slices."""
    by_priority, _ = train_by_priority()
    assert_same_bits(by_priority)
    torch.testing.assert_close(by_priority, train_plainly(), rtol=1e-4, atol=1e-5)
    usual, orders = scheduling.issue_order, []
    for reverse in (False, True):  # each rank would choose another order
        shift = dist.get_rank()
        scheduling.issue_order = lambda ready_s, needed, takes_s, reverse=reverse, shift=shift: sorted(
            range(len(needed)), key=lambda index: (index + shift) % len(needed), reverse=reverse
        )
        again, order = train_by_priority()
        assert torch.equal(again, by_priority)
        orders.append(order)
    assert orders[0] == orders[1][::-1]
    scheduling.issue_order = usual


def replicas():
    generator = torch.Generator().manual_seed(5)
    shapes = [(40, 30), (40,), (30, 50), (30,), (50, 1), (50,), (1,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    return parameters


def check_norms():
    """Shared norms equal local ones, also of fewer tensors than ranks."""
    shared = SharedNorms()
    for count in (0, 1, 2, 7):
        tensors = [parameter.detach() for parameter in replicas()[:count]]
        assert torch.equal(shared(tensors), local_norms(tensors))
    own = divide(tuple(tensor.numel() for tensor in tensors), dist.get_world_size())[dist.get_rank()]
    others_spoilt = [
        tensor if index in own else torch.full_like(tensor, torch.nan) for index, tensor in enumerate(tensors)
    ]
    assert torch.equal(shared(others_spoilt), local_norms(tensors))  # each rank reads its own share only
    chosen = choose_norms(replicas())
    assert_same_value(type(chosen).__name__)
