"""Helpers of the workers in this folder: exchanges, DDP models, and comparisons between ranks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm.comm.build import build_exchange
from dlrm.comm.config import EXCHANGES, PLAIN, SPARSE, CommConfig
from dlrm.comm.consistency import NUM_FLAGS

CPU = torch.device("cpu")
SIZE = 203
STEPS = 20
PER_NODE = 2
SUMMING = [name for name in EXCHANGES if name not in PLAIN or name == "dense"]


def drawn(size, seed):
    """A random vector, another one on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(size, generator=generator)


def checks_of(module):
    """All functions of a worker named `check_...`, in their order, without imported ones."""
    own = [each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__]
    return [each for each in own if each.__name__.startswith("check_")]


def of_all(tensor, group=None):
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    if tensor.numel():
        dist.all_gather(pieces, tensor.contiguous(), group=group)
    return torch.stack(pieces)


def assert_same_bits(tensor, group=None):
    everybody = of_all(tensor.detach().view(torch.int32), group)
    assert (everybody == everybody[0]).all()


def assert_same_value(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    assert all(each == values[0] for each in values), values


def configured(**options):
    """A configuration without the options that its exchange would refuse."""
    controller = options.get("controller", "fixed")
    if options["exchange"] not in (*SPARSE, "auto") or controller != "fixed":
        options.pop("ratio", None)
    if not controller.startswith("gravac"):
        options.pop("window_steps", None)
    return CommConfig(**options)


def build(size=SIZE, **options):
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    return build_exchange(configured(**options), size, CPU)


def sum_of(exchange, gradient, problem=None):
    """The sum over ranks of a gradient, which is left unchanged."""
    return exchange.combine(torch.cat([gradient, torch.zeros(NUM_FLAGS)]), problem=problem)[0]


def residual_of(exchange):
    return exchange.residual.state_dict()["memory"].get("residual", torch.zeros(SIZE)).clone()


def buffer_of(exchange, values, num_scalars=0):
    """The argument of `combine` with a gradient and scalars."""
    flat = exchange.make_buffer(num_scalars)
    flat[: values.numel()] = values
    return flat


class Layers(nn.Module):
    """A model of several buckets, whose layer `spare` is optional."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.spare = nn.Linear(5, 40), nn.Linear(40, 1), nn.Linear(40, 1)

    def forward(self, inputs, spare):
        hidden = self.first(inputs).relu()
        return self.second(hidden) + (self.spare(hidden) if spare else 0.0)


def samples(sizes, seed):
    """Samples of all ranks, and the slice of this rank's."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(sum(sizes), 5, generator=generator)
    targets = torch.randn(sum(sizes), 1, generator=generator)
    mine = slice(sum(sizes[: dist.get_rank()]), sum(sizes[: dist.get_rank() + 1]))
    return inputs, targets, mine


def flat_gradient(module):
    return torch.cat(
        [
            torch.zeros_like(parameter).view(-1) if parameter.grad is None else parameter.grad.view(-1)
            for parameter in module.parameters()
        ]
    )


def ddp(**options):
    return DistributedDataParallel(Layers(), bucket_cap_mb=1e-4, find_unused_parameters=True, **options)
