"""A sharded model with a dynamic and a static table in one FBGEMM module."""

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards, table_groups
from dlrm.sharding.dynamic import make_dynamic
from dlrm.sharding.dynamic.index import mix
from dlrm.sharding.host_lookup import use_host_lookups
from tests.cpr.shards.models import bags, shard

SEED = 5
STATIC_ROWS = 20
EXTREMES = (0, -1, -(2**63), 2**63 - 1)


def build(capacity, admit_after=1, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD, host=False):
    """The model, and its dynamic table `d`; without one if `admit_after` is 0. `s` has TorchRec's values."""
    torch.manual_seed(7)
    model = shard({"d": "tw", "s": "tw"}, optimizer, ebc=bags(d=capacity, s=STATIC_ROWS))
    tables = make_dynamic(model, {"d": admit_after}, SEED) if admit_after else [None]
    if host:
        use_host_lookups([group.emb_module for group in table_groups(model)], torch.float32)
    return model, tables[0]


def raw_ids(numbers):
    """Ids all over the 64-bit integers for 0, 1, 2, ...; the first few are the extremes."""
    ids = mix(numbers)
    for number, extreme in enumerate(EXTREMES):
        ids[numbers == number] = extreme
    return ids


def batch(step, num_ids=60, size=8, ids_of=raw_ids):
    """Bags of 0 to 4 ids of `d`, the smaller numbers more often, and of `s`."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (2 * size,), generator=generator)
    num_d, num_s = int(lengths[:size].sum()), int(lengths[size:].sum())
    numbers = (torch.rand(num_d, generator=generator).square() * num_ids).to(torch.int64)
    static = torch.randint(0, STATIC_ROWS, (num_s,), generator=generator)
    return KeyedJaggedTensor(
        keys=["f_d", "f_s"], values=torch.cat([ids_of(numbers), static]), lengths=lengths
    )


def pooled(model, features):
    """Of both tables, `[B, 2 * DIM]`."""
    return model.module.ebc(features).values()


def train(model, steps, **how):
    """Steps of the tables alone; what they put out."""
    outputs = []
    for step in steps:
        out = pooled(model, batch(step, **how))
        (out.square().sum() + out.sum()).backward()
        outputs.append(out.detach().clone())
    return outputs


def columns_of(model):
    """Copies of all columns of all tables."""
    return {
        f"{shard.name}/{name}": column.clone()
        for shard in find_shards(model)
        for name, column in shard.columns.items()
    }


def contents(model):
    """What each id of the dynamic table has: its weights and the sum of row-wise Adagrad."""
    columns = find_shards(model)[0].columns
    used = (columns["last_seen"] > 0).nonzero().squeeze(1).tolist()
    ids = [int(columns["id"][row]) for row in used]
    assert len(set(ids)) == len(ids)
    return {
        each: (*columns["weights"][row].tolist(), columns["sum"][row].item())
        for each, row in zip(ids, used, strict=True)
    }
