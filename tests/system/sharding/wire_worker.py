"""Workers of `test_wire` that count the bytes of a step, or measure their links together."""

import logging
import math
import os
from dataclasses import dataclass
from logging.handlers import BufferingHandler

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.comm.consistency import NUM_FLAGS
from dlrm.comm.links import Link
from dlrm.config.schema import Config, ModelConfig, ShardingConfig, TrainConfig
from dlrm.dense_sync import AllReduceSync
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting import costs
from dlrm.sharding.splitting.planning import planner, torchrec_plan
from dlrm.sharding.splitting.planning.cluster import Cluster, measure
from dlrm.sharding.splitting.planning.shapes import PlanSetting, shapes_of
from dlrm.sharding.splitting.planning.strategies import options
from dlrm.sharding.splitting.wire import counted
from dlrm.training import build
from dlrm.training import model as sharded
from tests.dlrm.inputs import fake_inputs

FEATURES = tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((50, 7, 300, 24, 11)))
CPU = torch.device("cpu")
DIM = 16
NUM_DENSE = 13


@dataclass(frozen=True)
class Case:
    """A model and its sharding."""

    kind: str
    strategy: str
    batch_sizes: tuple[int, ...]
    wire_dtype: str = "fp32"
    exchange_dtype: str = "fp32"
    precision: str = "fp32"
    chosen: str = ""
    """The stored choice of `auto`."""
    ranks_per_node: int = 0
    """0: all are on one."""
    small_rows: int = 0
    """Tables with at most so many are replicated where TorchRec's plan is kept."""
    dim: int = DIM
    refusal: str = ""
    """Expected reason for keeping TorchRec's plan although a split is configured."""


def check(case: Case) -> None:
    """One step sends exactly the bytes that the planner predicts."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(case.ranks_per_node or num_ranks)
    config = Config(
        model=ModelConfig(
            kind=case.kind, embedding_dim=case.dim, bottom_mlp=(8, case.dim), top_mlp=(12, 1), cross_rank=8
        ),
        sharding=ShardingConfig(
            data_parallel_rows=case.small_rows,
            strategy=case.strategy,
            wire_dtype=case.wire_dtype,
            exchange_dtype=case.exchange_dtype,
        ),
        train=TrainConfig(precision=case.precision),
    )
    seen = []
    make_plan = sharded.make_plan

    def spying(model, sharder, *arguments):
        plan = make_plan(model, sharder, *arguments)
        setting = PlanSetting(num_ranks=num_ranks, ids={}, dense=config.dense, device=CPU)
        inside = sum(each.numel() for name, each in model.named_parameters() if ".tables." not in name)
        seen.append((shapes_of(model, plan, sharder, setting), inside))
        return plan

    load_choice = planner.load_choice
    sharded.make_plan, planner.load_choice = (
        spying,
        lambda folder: dict.fromkeys(("sparse", "wide"), case.chosen),
    )
    heard = BufferingHandler(capacity=100)
    planner.logger.addHandler(heard)
    try:
        model = build.shard(fake_inputs(config, FEATURES, max(case.batch_sizes)))
    finally:
        sharded.make_plan, planner.load_choice = make_plan, load_choice
        planner.logger.removeHandler(heard)
    warned = [record.getMessage() for record in heard.buffer if record.levelno >= logging.WARNING]
    assert len(warned) == (bool(case.refusal) and rank == 0), warned
    assert all("keeps TorchRec's plan" in each and case.refusal in each for each in warned)
    ((shapes, dense_numbers),) = seen
    for sizes in (case.batch_sizes, case.batch_sizes):  # the second step has nothing left to set up
        dense, labels, sparse = batch_of(sizes[rank])
        with counted() as wire:
            loss = binary_cross_entropy_with_logits(model(dense, sparse), labels)
            loss.backward()
            AllReduceSync(dense_parameters(model), 0).average(torch.zeros(0))
    values, ids = expected(case, shapes, dense_numbers, rank)
    assert values > 0
    assert wire.value_bytes == pytest.approx(values), (case, wire.sent)
    if case.chosen == "rows":
        return  # which rank an id goes to is chance
    # TorchRec sends ahead how many lengths and ids will come, and some releases a tag besides
    ahead = len(shapes) * (num_ranks - 1) * costs.ID_BYTES
    assert wire.id_bytes - ids in {2 * ahead, 3 * ahead}, (case, wire.id_bytes, ids)


def batch_of(size):
    """Samples of one rank, an id a bag."""
    ids = [torch.randint(0, feature.rows, (size,)) for feature in FEATURES]
    bags = KeyedJaggedTensor(
        keys=[feature.name for feature in FEATURES],
        values=torch.cat(ids),
        lengths=torch.ones(size * len(FEATURES), dtype=torch.int64),
    )
    return torch.randn(size, NUM_DENSE), torch.zeros(size), bags


def expected(case, shapes, dense_numbers, rank):
    """Bytes of values and of ids that leave a rank in a step."""
    num_ranks = len(case.batch_sizes)
    link = Link(latency_s=0.0, bytes_per_s=1.0)
    per_node = case.ranks_per_node or num_ranks
    cluster = Cluster(num_ranks=num_ranks, ranks_per_node=per_node, inside=link, between=link)
    wire_dtype = torchrec_plan.WIRE_DTYPES[case.wire_dtype]
    split = "exchange" if case.refusal else "split"
    wanted = {"torchrec": "exchange", "des": split, "auto": case.chosen}[case.strategy]
    values = ids = 0.0
    for shape in shapes:
        dense_numbers -= shape.weights  # its own, which the option counts
        offered = options(
            shape, cluster, case.batch_sizes, None if wire_dtype is None else wire_dtype.itemsize
        )
        (option,) = [each for each in offered if each.strategy == wanted]
        assert not option.illegal
        assert not case.refusal or all(case.refusal in each.illegal for each in offered if each is not option)
        values += sum(each.sent_by(rank) for each in option.values)
        ids += sum(each.sent_by(rank) for each in option.inputs)
    averaged = dense_numbers + NUM_FLAGS
    values += sum(each.sent_by(rank) for each in costs.all_reduce(averaged, num_ranks))
    return values, ids


def measure_together() -> None:
    """All get the same answer, whatever is known of each link."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for here, agreed in ((2, 2), (1, 1), (num_ranks, num_ranks), (1 + rank % 2, num_ranks)):
        os.environ["LOCAL_WORLD_SIZE"] = str(here)
        cluster = measure(CPU)
        everybody = [None] * num_ranks
        dist.all_gather_object(everybody, cluster)
        assert everybody == [cluster] * num_ranks
        assert (cluster.num_ranks, cluster.ranks_per_node) == (num_ranks, agreed)
        for link, used in ((cluster.inside, agreed > 1), (cluster.between, agreed < num_ranks)):
            assert math.isfinite(link.bytes_per_s) == used
            assert link.bytes_per_s > 0
            assert (link.latency_s > 0) == used
        assert 0 < cluster.s_per_id < math.inf
        assert 0 < cluster.memory_bytes_per_s < math.inf
