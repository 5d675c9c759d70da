"""Tables without pooling give the rows of their ids and learn as in plain PyTorch, however they are sharded.

`tests/system/recovery/test_collections.py` does the same on two ranks, with pieces that have no rows.
"""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards
from dlrm.sharding.sequences import SequenceSharder
from tests.cpr.shards.models import CPU, DIM, META, kinds

ROWS = {"past": 11, "item": 7}
FEATURES = {"f": "past", "g": "past", "h": "item"}
RATE = 0.1


class Rows(nn.Module):
    """Only a collection."""

    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingConfig(
                name=table,
                embedding_dim=DIM,
                num_embeddings=rows,
                feature_names=[feature for feature, of in FEATURES.items() if of == table],
            )
            for table, rows in ROWS.items()
        ]
        self.tables = EmbeddingCollection(tables=tables, device=META)

    def forward(self, features):
        return self.tables(features)


def shard(kind):
    model = Rows()
    sharder = SequenceSharder({"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": RATE})
    per_table = dict.fromkeys(ROWS, kinds()[kind])
    plan = construct_module_sharding_plan(
        model.tables, per_table, sharder=sharder, local_size=1, world_size=1, device_type="cpu"
    )
    return DistributedModelParallel(
        model, device=CPU, plan=ShardingPlan({"tables": plan}), sharders=[sharder]
    )


@pytest.mark.parametrize("lengths", [[2, 0, 3, 1, 1, 0], [0, 0, 0, 0, 2, 2], [0] * 6])
@pytest.mark.parametrize("kind", ["tw", "cw", "rw", "dp"])
def test_rows_and_updates_are_those_of_plain_tables(world_of_one, kind, lengths):
    model = shard(kind)
    whole = {table: torch.rand(rows, DIM) for table, rows in ROWS.items()}
    shards = find_shards(model)
    for each in shards:
        each.weights.copy_(whole[each.table_name][:, slice(*each.extent.cols)])
    generator = torch.Generator().manual_seed(3)
    ids = [torch.randint(0, 7, (size,), generator=generator) for size in lengths]
    features = KeyedJaggedTensor(keys=list(FEATURES), values=torch.cat(ids), lengths=torch.tensor(lengths))
    found = model(features)
    for at, (feature, table) in enumerate(FEATURES.items()):
        expected = whole[table][torch.cat(ids[2 * at : 2 * at + 2])]
        assert torch.equal(found[feature].values(), expected), feature
        assert found[feature].lengths().tolist() == lengths[2 * at : 2 * at + 2]
    sum(each.values().square().sum() for each in found.values()).backward()
    counts = {table: torch.zeros(rows, 1) for table, rows in ROWS.items()}
    for at, table in enumerate(FEATURES.values()):
        of_feature = torch.cat(ids[2 * at : 2 * at + 2])
        counts[table] += torch.bincount(of_feature, minlength=ROWS[table]).unsqueeze(1)
    if kind == "dp":  # FBGEMM leaves the update to an optimizer of the user
        torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=RATE).step()
    for each in shards:
        before = whole[each.table_name]
        after = before - RATE * 2 * counts[each.table_name] * before  # of the sum of squares
        torch.testing.assert_close(each.weights, after[:, slice(*each.extent.cols)])
