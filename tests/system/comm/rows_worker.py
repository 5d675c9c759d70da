"""Checks of row-sparse gradients and of encoded embedding exchanges between two ranks."""

import copy
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards, table_groups
from data.dataset import Feature
from dlrm.comm.row_sparse import RowSums, bytes_by_rows, bytes_dense, send_touched_rows
from dlrm.config.schema import (
    Config,
    DenseConfig,
    ModelConfig,
    ScheduleConfig,
    ShardingConfig,
    TablesConfig,
    TrainConfig,
)
from dlrm.launch.device import Ranks
from dlrm.optim.build import Optimizers
from dlrm.sharding.splitting.wire import counted
from dlrm.training.build import shard
from tests.system.comm.common import assert_same_bits

RANKS = 2
DIM = 16
FEATURES = tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((2000, 700, 3000, 40)))
COUNT_BYTES = 8


def sparse_gradient(rank, step, rows, columns, touched):
    """The gradient of a rank in a step, which all ranks can compute."""
    generator = torch.Generator().manual_seed(step * RANKS + rank)
    gradient = torch.zeros(rows, columns)
    numbers = torch.randperm(rows, generator=generator)[:touched]
    gradient[numbers] = torch.randn(touched, columns, generator=generator)
    return gradient


def check_many_steps_of_sparse_gradients():
    """Sums are exact, for tables that are sent by rows or densely, and a dense gradient."""
    sums, shapes = RowSums(), ((400, 8, 30), (50, 4, 45), (3000, 16, 7))
    weights = [torch.zeros(rows, columns) for rows, columns, _ in shapes]
    rank = dist.get_rank()
    for step in range(30):
        every = [[sparse_gradient(each, step, *shape) for shape in shapes] for each in range(RANKS)]
        own = [gradient.clone() for gradient in every[rank]]
        other = torch.full((3, 5), float(rank + 1))
        with counted() as wire:
            sums.sum_(own, [other])
        for weight, found, parts in zip(weights, own, zip(*every, strict=True), strict=True):
            assert torch.equal(found, parts[0] + parts[1])
            weight.sub_(found, alpha=0.1)
        assert other.eq(3).all()
        by_rows = sum(
            bytes_by_rows([touched] * RANKS, columns) for _, columns, touched in (shapes[0], shapes[2])
        )
        assert wire.value_bytes == by_rows + bytes_dense(50 * 4 + 15, RANKS)
        assert wire.id_bytes == len(shapes) * COUNT_BYTES
    for weight in weights:
        assert_same_bits(weight)


def check_one_busy_rank_decides_for_all():
    """Ranks that touch very different numbers of rows decide alike."""
    rank, sums = dist.get_rank(), RowSums()
    for here, there, name in (
        (100, 0, "all_reduce"),
        (60, 1, "isend"),
        (0, 80, "isend"),
        (3, 99, "all_reduce"),
    ):
        every = [sparse_gradient(0, here, 100, 8, here), sparse_gradient(1, here, 100, 8, there)]
        found = every[rank].clone()
        with counted() as wire:
            sums.sum_([found])
        assert torch.equal(found, every[0] + every[1])
        values = {
            operation for (operation, dtype), sent in wire.sent.items() if dtype.is_floating_point and sent
        }
        assert values == ({name} if name == "all_reduce" or (here, there)[rank] else set()), (here, there)


def check_zeros_and_nan():
    """Zeros send nothing; a NaN or infinity of one rank reaches all."""
    sums, nothing = RowSums(), torch.zeros(100, 8)
    with counted() as wire:
        sums.sum_([nothing])
        sums.sum_([])
    assert not nothing.any()
    assert wire.value_bytes == 0
    gradient = torch.zeros(100, 8)
    if dist.get_rank() == 1:
        gradient[7, 3], gradient[9, 1] = torch.nan, -torch.inf
    sums.sum_([gradient])
    assert gradient[7, 3].isnan()
    assert gradient[9, 1] == -torch.inf
    assert gradient.isfinite().sum() == 100 * 8 - 2


class Tagger(nn.Module):
    """A model with a table and layers, one of which is never used."""

    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(500, 8, mode="sum")
        self.layer = nn.Linear(8, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, ids):
        return self.layer(self.table(ids))


def check_a_ddp_model_trains_bit_for_bit():
    """Gradients of two ranks equal those of DDP, bit for bit."""
    torch.manual_seed(3)
    plain = Tagger()
    modules = [
        DistributedDataParallel(model, find_unused_parameters=True) for model in (plain, copy.deepcopy(plain))
    ]
    send_touched_rows(modules[1], {modules[1].module.table.weight: [(500, 8)]})
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):  # DDP rebuilds its buckets after the first
        ids = torch.randint(0, 500, (6, 4), generator=generator)
        with counted() as wire:
            for module in modules:
                module.zero_grad()
                module(ids).square().mean().backward()
        for one, other in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None)
            assert one.grad is None or torch.equal(one.grad, other.grad)
        assert 0 < wire.sent["isend", torch.float32] <= bytes_by_rows([24, 24], 8)


def sharded(sharding, precision="fp32", kind="dlrm"):
    """A model as the trainer makes it."""
    rank = dist.get_rank()
    config = Config(
        model=ModelConfig(kind=kind, embedding_dim=DIM, bottom_mlp=(8, DIM), top_mlp=(12, 1)),
        sharding=sharding,
        train=TrainConfig(precision=precision),
    )
    model = shard(
        SimpleNamespace(
            config=config,
            ranks=Ranks(rank=rank, local_rank=rank, world_size=RANKS),
            device=torch.device("cpu"),
            manifest=SimpleNamespace(features=FEATURES, dense=("dense",) * 3),
            loader=SimpleNamespace(config=SimpleNamespace(batch_size=16)),
            ids={},
        )
    )
    return model, Optimizers(model, DenseConfig(), TablesConfig(), ScheduleConfig())


def batch(step):
    """Samples of this rank, with one id per bag."""
    generator = torch.Generator().manual_seed(step * RANKS + dist.get_rank())
    ids = [torch.randint(0, feature.rows, (16,), generator=generator) for feature in FEATURES]
    bags = KeyedJaggedTensor(
        keys=[feature.name for feature in FEATURES],
        values=torch.cat(ids),
        lengths=torch.ones(16 * len(FEATURES), dtype=torch.int64),
    )
    dense = torch.rand(16, 3, generator=generator)
    return dense, torch.randint(0, 2, (16,), generator=generator).float(), bags


def train(model, optimizers, steps=3):
    """Train; returns the wire of the last step and its logits."""
    for step in range(steps):
        dense, labels, bags = batch(step)
        optimizers.begin_step(step)
        with counted() as wire:
            logits = model(dense, bags)
            binary_cross_entropy_with_logits(logits, labels).backward()
        optimizers.step()
    return wire, logits.detach()


def check_the_trainers_replicated_tables():
    """By rows, tables train bit for bit as under DDP, with fewer bytes."""
    tables, wires = [], []
    for gradients in ("dense", "rows"):
        sharding = ShardingConfig(
            strategy="torchrec", data_parallel_rows=2500, data_parallel_gradients=gradients
        )
        model, optimizers = sharded(sharding)
        wire, _ = train(model, optimizers)
        wires.append(wire)
        replicated = {each.name: each.weights for each in find_shards(model) if each.replicated}
        assert len(replicated) == 3
        for weights in replicated.values():
            assert_same_bits(weights)
        tables.append(replicated)
    for name, weights in tables[0].items():
        assert torch.equal(weights, tables[1][name]), name
    _, _, bags = batch(2)
    touched = sum(bags[name].values().unique().numel() for name in ("cat_0", "cat_1", "cat_3"))
    assert wires[0].sent["isend", torch.float32] == 0
    assert wires[1].sent["isend", torch.float32] == touched * (1 + DIM) * 4
    assert touched * (1 + DIM) * 4 < 0.05 * bytes_dense(2740 * DIM, RANKS)


def a_step_stays_near(exchange_dtype, precision, most_replicated=200):
    """Encoded exchanges change logits and tables, but little."""
    found = []
    for each in ("fp32", exchange_dtype):
        sharding = ShardingConfig(
            strategy="torchrec", exchange_dtype=each, data_parallel_rows=most_replicated
        )
        model, optimizers = sharded(sharding, precision)
        before = {each.name: each.weights.clone() for each in find_shards(model)}
        _, logits = train(model, optimizers, steps=1)
        moved = {each.name: each.weights - before[each.name] for each in find_shards(model)}
        found.append((logits, moved))
    (exact, tables), (rounded, others) = found
    torch.testing.assert_close(rounded, exact, rtol=0, atol=1e-2 if precision == "bf16" else 1e-3)
    for name, moved in tables.items():
        assert (others[name] - moved).norm() < 0.05 * moved.norm(), name
    same = torch.equal(rounded, exact) and all(torch.equal(others[name], tables[name]) for name in tables)
    assert same == (exchange_dtype == precision)


def check_nan_of_a_table_reaches_all_ranks():
    """FBGEMM's own int8 would turn NaN into numbers."""
    sharding = ShardingConfig(strategy="torchrec", exchange_dtype="int8")
    model, _ = sharded(sharding, kind="fm")  # no ReLU, which would hide it
    for group in table_groups(model):
        for table in group.tables:
            if table.table_name == "cat_2":
                table.weights.fill_(torch.nan)
    dense, _, bags = batch(0)
    assert model(dense, bags).isnan().all()
