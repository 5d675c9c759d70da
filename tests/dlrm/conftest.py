"""What tests of the trainer share: a world of one, models with real tables, batches of bags."""

import pytest
import torch
import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.batch import Batch
from data.dataset import Feature
from dlrm.models.tables import PooledFeatures


@pytest.fixture(scope="module")
def world_of_one():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


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

    def work(size, seed, multi_hot=False):
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
            dense=torch.rand(size, 13, generator=generator),
            sparse=KeyedJaggedTensor(
                keys=[feature.name for feature in features], values=ids, lengths=lengths
            ),
            labels=torch.randint(0, 2, (size,), generator=generator).float(),
            num_valid=size,
        )

    return work
