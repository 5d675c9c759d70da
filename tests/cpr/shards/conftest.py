"""Sharded models whose layout a test chooses table by table."""

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

DIM = 8
META = torch.device("meta")
KINDS = {
    "tw": lambda: table_wise(rank=0, compute_kernel="fused"),
    "cw": lambda: column_wise(ranks=[0, 0], compute_kernel="fused"),
    "rw": lambda: row_wise(compute_kernel="fused"),
    "dp": data_parallel,
    "tw_unfused": lambda: table_wise(rank=0, compute_kernel="dense"),
}


class Model(nn.Module):
    """Sparse collections by name, and a dense part with a buffer of each kind."""

    def __init__(self, **collections):
        super().__init__()
        for name, collection in collections.items():
            self.add_module(name, collection)
        self.dense = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


@pytest.fixture(scope="session")
def bags():
    """An `EmbeddingBagCollection` of tables `name=rows`."""

    def work(dim=DIM, **rows):
        return EmbeddingBagCollection(
            device=META,
            tables=[
                EmbeddingBagConfig(
                    name=name, embedding_dim=dim, num_embeddings=count, feature_names=[f"f_{name}"]
                )
                for name, count in rows.items()
            ],
        )

    return work


@pytest.fixture(scope="session")
def sequences():
    """An `EmbeddingCollection` of tables `name=rows`."""

    def work(**rows):
        return EmbeddingCollection(
            device=META,
            tables=[
                EmbeddingConfig(
                    name=name, embedding_dim=DIM, num_embeddings=count, feature_names=[f"f_{name}"]
                )
                for name, count in rows.items()
            ],
        )

    return work


@pytest.fixture(scope="module")
def world_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def shard(world_of_one):
    """Shards a model of collections; `kinds` gives each table's name a key of KINDS."""

    def work(kinds, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, init_data_parallel=True, **collections):
        fused = {"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-8}
        sharders = [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]
        model = Model(**collections)
        plans = {
            name: construct_module_sharding_plan(
                collection,
                {table: KINDS[kinds[table]]() for table in _tables(collection)},
                sharder=sharders[isinstance(collection, EmbeddingCollection)],
                local_size=1,
                world_size=1,
                device_type="cpu",
            )
            for name, collection in collections.items()
        }
        return DistributedModelParallel(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan(plans),
            sharders=sharders,
            init_data_parallel=init_data_parallel,
        )

    return work


def _tables(collection):
    if isinstance(collection, EmbeddingCollection):
        return [table.name for table in collection.embedding_configs()]
    return [table.name for table in collection.embedding_bag_configs()]
