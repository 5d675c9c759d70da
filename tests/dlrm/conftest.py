"""Fixtures of the trainer's tests: a group of one, sharded models, batches."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards
from data.batch import Batch
from data.dataset import Feature
from data.synthetic import SyntheticConfig
from dlrm.config.schema import Config, ModelConfig, ShardingConfig, TablesConfig, TrainConfig
from dlrm.sharding import plan
from dlrm.sharding.pooled import PooledFeatures
from dlrm.training.build import shard
from tests.datasets import generate_few
from tests.dlrm.inputs import fake_inputs


@pytest.fixture(scope="module")
def world_of_one():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def small_dataset(tmp_path_factory):
    """Three days of 256 samples in two row groups each; tests must not change the files."""
    folder = tmp_path_factory.mktemp("data") / "dataset"
    return generate_few(
        SyntheticConfig(scale=1e-4, days=3, rows_per_day=256, rows_per_block=128, rows_per_file=256), folder
    )


@pytest.fixture(scope="session")
def features():
    return tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((50, 7, 300, 24)))


@pytest.fixture(scope="session")
def materialize():
    """Gives a model's tables real values on the CPU."""

    def work(model, seed=0):
        generator = torch.Generator().manual_seed(seed)
        for module in model.modules():
            if isinstance(module, PooledFeatures):
                module.tables.to_empty(device=torch.device("cpu"))
                for table in module.tables.embedding_bags.values():
                    table.weight.data.normal_(std=0.3, generator=generator)
        return model

    return work


@pytest.fixture(scope="session")
def make_batch(features):
    """Random batches; multi-hot ones have bags of 0 to 3 ids."""
    all_features = features

    def work(size, seed, multi_hot=False, features=all_features, num_dense=13, weighted=False):
        generator = torch.Generator().manual_seed(seed)
        bags = size * len(features)
        lengths = (
            torch.randint(0, 4, (bags,), generator=generator)
            if multi_hot
            else torch.ones(bags, dtype=torch.int64)
        )
        rows = torch.tensor([feature.rows for feature in features]).repeat_interleave(size)
        limits = rows.repeat_interleave(lengths)
        ids = (torch.rand(limits.numel(), generator=generator) * limits).long()
        return Batch(
            dense=torch.rand(size, num_dense, generator=generator),
            sparse=KeyedJaggedTensor(
                keys=[feature.name for feature in features],
                values=ids,
                lengths=lengths,
                weights=torch.randn(len(ids), generator=generator) if weighted else None,
            ),
            labels=torch.randint(0, 2, (size,), generator=generator).float(),
            num_valid=size,
        )

    return work


@pytest.fixture
def shard_model(world_of_one, features, monkeypatch):
    """Shards a model as the trainer does; `kinds` names the sharding kind of single tables.

    TorchRec never replicates tables for one rank by itself, but it can, and the path is the same.
    """

    all_features = features

    def work(kinds=None, model=None, tables=None, precision="fp32", batch_size=16, features=all_features):
        constraints_of = plan._constraints

        def with_kinds(*arguments):
            constraints = constraints_of(*arguments)
            for name, kind in (kinds or {}).items():
                kernels = None if kind == "data_parallel" else constraints[name].compute_kernels
                constraints[name] = replace(constraints[name], sharding_types=[kind], compute_kernels=kernels)
            return constraints

        monkeypatch.setattr(plan, "_constraints", with_kinds)
        config = Config(
            model=model or ModelConfig(embedding_dim=8, bottom_mlp=(16, 8), top_mlp=(16, 1)),
            tables=tables or TablesConfig(),
            sharding=ShardingConfig(min_column_dim=4),
            train=TrainConfig(precision=precision),
        )
        sharded = shard(fake_inputs(config, features, batch_size))
        monkeypatch.setattr(plan, "_constraints", constraints_of)
        return sharded

    return work


@pytest.fixture(scope="session")
def whole_tables():
    """Copies of all tables of a sharded model, put together from their pieces on this rank."""

    def work(model):
        tables = {}
        for found in find_shards(model):
            row, column = found.row_offset, found.col_offset
            name = found.table_fqn.rpartition(".")[2]
            whole = tables.setdefault(name, torch.full(found.table_shape, torch.nan))
            whole[row : row + found.num_rows, column : column + found.num_cols] = found.weights
        return tables

    return work
