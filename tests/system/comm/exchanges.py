"""What workers of `test_comm_exchange` share: exchanges, DDP models, and what all ranks hold."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm.comm.build import build_exchange
from dlrm.comm.config import EXCHANGES, PLAIN, SPARSE, CommConfig

CPU = torch.device("cpu")
SIZE = 203
STEPS = 100
PER_NODE = 2
SUMMING = [name for name in EXCHANGES if name not in PLAIN or name == "dense"]


def drawn(size, seed):
    """Another vector on each rank."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    return torch.randn(size, generator=generator)


def of_all(tensor):
    pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(pieces, tensor.contiguous())
    return torch.stack(pieces)


def assert_same_bits(tensor):
    everybody = of_all(tensor.detach().view(torch.int32))
    assert (everybody == everybody[0]).all()


def configured(**options):
    """Without options that its way of exchange does not read, which would be refused."""
    controller = options.get("controller", "fixed")
    if options["exchange"] not in (*SPARSE, "auto") or controller != "fixed":
        options.pop("ratio", None)
    if not controller.startswith("gravac"):
        options.pop("window_steps", None)
    return CommConfig(**options)


def build(size=SIZE, **options):
    os.environ["LOCAL_WORLD_SIZE"] = str(PER_NODE)
    return build_exchange(configured(**options), size, CPU)


def owed_by(exchange):
    return exchange.residual.state_dict()["memory"].get("residual", torch.zeros(SIZE)).clone()


def with_room(exchange, values, num_scalars=0):
    """For `combine`: a gradient, scalars, and the exchange's own places."""
    flat = exchange.make_buffer(num_scalars)
    flat[: values.numel()] = values
    return flat


class Layers(nn.Module):
    """Several buckets; `spare` is used only if asked for."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.spare = nn.Linear(5, 40), nn.Linear(40, 1), nn.Linear(40, 1)

    def forward(self, inputs, spare):
        hidden = self.first(inputs).relu()
        return self.second(hidden) + (self.spare(hidden) if spare else 0.0)


def samples(sizes, seed):
    """Of all ranks, and this rank's part."""
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
