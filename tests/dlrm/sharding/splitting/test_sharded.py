"""Heads under TorchRec's own planner and `DistributedModelParallel`, in one process."""

import pytest
import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards
from data.dataset import Feature
from dlrm.models.dlrm import DotHead
from dlrm.models.fm import LinearHead
from dlrm.sharding.splitting.rows import RowSplitSharder
from dlrm.sharding.splitting.sharded import HeadSharder, ShardedHead

FEATURES = [Feature(name="a", rows=7), Feature(name="b", rows=3)]
DIM = 8
HEADS = {
    "column_wise": lambda: DotHead(FEATURES, DIM, torch.float32),
    "table_wise": lambda: LinearHead(FEATURES),
}


class Model(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head
        self.bottom = nn.Linear(2, DIM)

    def forward(self, dense, sparse):
        return self.head(sparse, self.bottom(dense))


def planned_by_torchrec(kind):
    """A model whose head is split, and TorchRec's plan of it."""
    torch.manual_seed(2)
    model = Model(HEADS[kind]())
    tables = EmbeddingBagCollectionSharder({"learning_rate": 0.1})
    sharder = HeadSharder(type(model.head), tables)
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
    plan = planner.plan(model, [sharder])
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    return sharded, plan.plan


def bags(values, lengths):
    return KeyedJaggedTensor(keys=["a", "b"], values=torch.tensor(values), lengths=torch.tensor(lengths))


@pytest.mark.parametrize("kind", HEADS)
def test_torchrec_plans_and_splits_heads_like_other_modules(world_of_one, kind):
    sharded, plan = planned_by_torchrec(kind)
    assert list(plan) == ["head"]
    assert {each.sharding_type for each in plan["head"].values()} == {kind}
    assert isinstance(sharded.module.head, ShardedHead)
    assert sharded.module.head.unsharded_module_type is type(HEADS[kind]())
    names = set(sharded.module.head.sharded_parameter_names("head"))
    assert names == {f"head.tables.embedding_bags.{name}.weight" for name in "ab"}
    torch.manual_seed(2)
    whole = Model(HEADS[kind]())
    whole.head.tables.to_empty(device=torch.device("cpu"))
    for shard in find_shards(sharded):
        whole.get_parameter(f"{shard.table_fqn}.weight").data.copy_(shard.weights)
    batch = torch.randn(3, 2), bags([1, 6, 2, 0, 2], [1, 0, 2, 1, 1, 0])
    torch.testing.assert_close(sharded(*batch), whole(*batch))


def test_row_splits_are_offered_if_the_tables_support_them():
    for tables, expected in (
        (EmbeddingBagCollectionSharder(), ["table_wise"]),
        (RowSplitSharder(), ["table_wise", "row_wise"]),
    ):
        assert HeadSharder(LinearHead, tables).sharding_types("cpu") == expected


def test_bags_that_differ_by_feature_are_refused(world_of_one):
    sharded, _ = planned_by_torchrec("table_wise")
    sparse = KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.tensor([1, 2, 0]),
        lengths=torch.ones(3, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
    )
    with pytest.raises(ValueError, match="as many bags of every feature"):
        sharded(torch.randn(2, 2), sparse)
