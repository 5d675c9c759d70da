"""Sharded models with a sharding type per table, in one process or many."""

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
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import EnumerableShardingSpec, ShardingPlan, ShardMetadata
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

DIM = 8
META = torch.device("meta")
CPU = torch.device("cpu")


class Model(nn.Module):
    """Sparse collections by name, and a dense part with a buffer of each kind."""

    def __init__(self, **collections):
        super().__init__()
        self.names = list(collections)
        self.unpooled = {name for name, each in collections.items() if isinstance(each, EmbeddingCollection)}
        for name, collection in collections.items():
            self.add_module(name, collection)
        self.dense = nn.Sequential(nn.Linear(DIM, 4), nn.BatchNorm1d(4))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, features):
        found = [
            _rows(rows) if name in self.unpooled else rows.values()
            for name in self.names
            for rows in [self.get_submodule(name)(features[name])]
        ]
        return self.dense(torch.cat(found, 1).view(found[0].shape[0], -1, DIM).sum(1))


def _rows(found):
    """Of each sample, the rows of its bags of two one after the other."""
    return torch.cat([each.values().view(-1, 2 * DIM) for each in found.values()], 1)


def bags(**rows):
    """An `EmbeddingBagCollection` of tables `name=rows`."""
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=DIM, num_embeddings=count, feature_names=[f"f_{name}"])
        for name, count in rows.items()
    ]
    return EmbeddingBagCollection(device=META, tables=configs)


def sequences(**rows):
    """An `EmbeddingCollection` of tables `name=rows`."""
    configs = [
        EmbeddingConfig(name=name, embedding_dim=DIM, num_embeddings=count, feature_names=[f"f_{name}"])
        for name, count in rows.items()
    ]
    return EmbeddingCollection(device=META, tables=configs)


def kinds():
    """Sharding types of a table, for all ranks."""
    ranks = list(range(dist.get_world_size()))
    return {
        "tw": table_wise(rank=0, compute_kernel="fused"),
        "tw_last": table_wise(rank=ranks[-1], compute_kernel="fused"),
        "cw": column_wise(ranks=[0, ranks[-1]], compute_kernel="fused"),
        "rw": row_wise(compute_kernel="fused"),
        "twrw": _fused(table_row_wise(host_index=0), "table_row_wise"),
        "twcw": _fused(column_wise(ranks=[0, ranks[-1]]), "table_column_wise"),
        "grid": _grid,
        "dp": data_parallel(),
        "unfused": table_wise(rank=0, compute_kernel="dense"),
    }


def _fused(generate, kind):
    """A generator of a table's plan with a kernel and a kind that TorchRec's own functions do not offer."""

    def fused(*args, **options):
        sharding = generate(*args, **options)
        sharding.compute_kernel, sharding.sharding_type = "fused", kind
        return sharding

    return fused


def _grid(param, local_size, world_size, device_type, sharder):
    """A generator of a table's plan for grid sharding: both halves of the columns by rows."""
    by_rows = _fused(table_row_wise(host_index=0), "grid_shard")
    sharding = by_rows(param, local_size, world_size, device_type, sharder)
    half = param.shape[1] // 2
    pieces = [
        ShardMetadata(
            shard_offsets=[each.shard_offsets[0], first_column],
            shard_sizes=[each.shard_sizes[0], half],
            placement=each.placement,
        )
        for first_column in (0, half)
        for each in sharding.sharding_spec.shards
    ]
    sharding.sharding_spec, sharding.ranks = EnumerableShardingSpec(pieces), sharding.ranks * 2
    return sharding


def shard(layout, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, device=CPU, fused=None, **collections):
    """A `DistributedModelParallel` of `collections`; `layout` names one of `kinds` for each table."""
    sharders = [
        kind({"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-8, **(fused or {})})
        for kind in (EmbeddingBagCollectionSharder, EmbeddingCollectionSharder)
    ]
    plans = {
        name: construct_module_sharding_plan(
            collection,
            {table: kinds()[layout[table]] for table in table_names(collection)},
            sharder=sharders[isinstance(collection, EmbeddingCollection)],
            local_size=dist.get_world_size(),
            world_size=dist.get_world_size(),
            device_type=device.type,
        )
        for name, collection in collections.items()
    }
    return DistributedModelParallel(
        Model(**collections), device=device, plan=ShardingPlan(plans), sharders=sharders
    )


def table_names(collection):
    if isinstance(collection, EmbeddingCollection):
        return [table.name for table in collection.embedding_configs()]
    return [table.name for table in collection.embedding_bag_configs()]


def batch(seed, size, **rows):
    """Ids for a collection of tables `name=rows`: bags of two."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, count, (2 * size,), generator=generator) for count in rows.values()]
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in rows],
        values=torch.cat(ids),
        lengths=torch.full((size * len(rows),), 2),
    )
