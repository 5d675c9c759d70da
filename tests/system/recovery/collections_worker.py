"""Workers of a model with tables that are pooled by sum and by mean, weighted, shared, and not pooled at all.

`python -m tests.system.recovery.collections_worker FOLDER` under torchrun. Rank 1 loses its process and its
memory once, between two steps. The model is the same in plain PyTorch in `test_collections`.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import cpr
from cpr.shards import find_shards, table_groups
from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.sequences import SequenceSharder
from dlrm.sharding.splitting.rows import RowSplitSharder
from tests.cpr.shards.models import kinds

STEPS, SAVE_EVERY, KILL_AT = 24, 8, 13
GLOBAL_BATCH = 8
RATE, EPS = 0.1, 1e-8
META = torch.device("meta")
SUM, MEAN = PoolingType.SUM, PoolingType.MEAN
TABLES = {
    "user": (41, 8, ("f", "g")),
    "topic": (5, 16, ("h",)),
    "shop": (17, 8, ("k",)),
    "past": (53, 8, ("f", "s")),
    "seen": (19, 8, ("t",)),
    "few": (1, 8, ("one",)),
    "item": (23, 8, ("s", "g")),
}
"""Rows, columns and features of each table."""
LAYOUT = {
    "user": "rw", "topic": "cw", "shop": "dp", "past": "rw", "seen": "cw", "few": "rw", "item": "dp",
}  # fmt: skip
COLLECTIONS = {
    "pooled": ("user", "topic"),
    "weighted": ("shop",),
    "unpooled": ("past", "seen", "few", "item"),
}
FEATURES = {"f": 41, "g": 23, "h": 5, "k": 17, "s": 23, "t": 19, "one": 1}
"""Rows that ids of each feature may have."""
WEIGHTED = "k"


def values_of(table):
    """Initial values that tell table and place."""
    rows, dim, _ = TABLES[table]
    generator = torch.Generator().manual_seed(list(TABLES).index(table))
    return torch.rand(rows, dim, generator=generator) - 0.5


def samples(step):
    """Ids and weights of each sample of a global batch, by feature; some have none."""
    generator = torch.Generator().manual_seed(1000 + step)
    found = {}
    for feature, rows in FEATURES.items():
        sizes = torch.randint(0, 4, (GLOBAL_BATCH,), generator=generator).tolist()
        found[feature] = [
            (torch.randint(0, rows, (n,), generator=generator), torch.rand(n, generator=generator))
            for n in sizes
        ]
    return found


def features_of(tables):
    return sorted({feature for table in tables for feature in TABLES[table][2]})


def jagged(step, rank, world_size, features, weighted=False):
    """This rank's samples of a global batch."""
    bags = [bag for feature in features for bag in samples(step)[feature][rank::world_size]]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat([ids for ids, _ in bags]),
        lengths=torch.tensor([len(ids) for ids, _ in bags]),
        weights=torch.cat([weights for _, weights in bags]) if weighted else None,
    )


class Model(nn.Module):
    """A score from all tables: what is not pooled goes through a tanh of its own."""

    def __init__(self):
        super().__init__()

        def bag(name, pooling=SUM):
            rows, dim, features = TABLES[name]
            return EmbeddingBagConfig(
                name=name,
                num_embeddings=rows,
                embedding_dim=dim,
                feature_names=list(features),
                pooling=pooling,
            )

        def sequence(name):
            rows, dim, features = TABLES[name]
            return EmbeddingConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features)
            )

        self.pooled = EmbeddingBagCollection(tables=[bag("user"), bag("topic", MEAN)], device=META)
        self.weighted = EmbeddingBagCollection(tables=[bag("shop")], is_weighted=True, device=META)
        self.unpooled = EmbeddingCollection(
            tables=[sequence(name) for name in COLLECTIONS["unpooled"]], device=META
        )
        self.dense = nn.Linear(5, 1)

    def forward(self, pooled, weighted, unpooled):
        bags, shops, rows = self.pooled(pooled), self.weighted(weighted), self.unpooled(unpooled)
        parts = [bags["f"].sum(1) * bags["g"].mean(1), bags["h"].square().sum(1), shops["k"].sum(1)]
        totals = {name: total(each.values(), each.lengths()) for name, each in rows.items()}
        parts += [sum(totals.values()), totals["s@item"]]
        return self.dense(torch.stack(parts, 1)).squeeze(1)


def total(rows, lengths):
    """Of each sample: sum over its rows."""
    samples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    return torch.zeros(len(lengths)).index_add(0, samples, torch.tanh(rows).sum(1))


def sharded(layout):
    """The sharded model, with all optimizers but the fused one."""
    torch.manual_seed(3)
    model = Model()
    fused = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": RATE, "eps": EPS}
    sharders = [RowSplitSharder(fused), SequenceSharder(fused)]
    world = dist.get_world_size()
    plans = {
        name: construct_module_sharding_plan(
            model.get_submodule(name),
            {table: kinds()[layout[table]] for table in tables},
            sharder=sharders[name == "unpooled"],
            local_size=world,
            world_size=world,
            device_type="cpu",
        )
        for name, tables in COLLECTIONS.items()
    }
    parallel = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plans), sharders=sharders
    )
    use_host_lookups([group.emb_module for group in table_groups(parallel)], torch.float32)
    others = [p for p in parallel.parameters() if p.numel() and not hasattr(p, "_in_backward_optimizers")]
    return parallel, torch.optim.Adagrad(others, lr=RATE, eps=EPS)


def pieces(shards):
    """(table, first row, first column, weights, sum) of each shard."""
    return [
        (s.table_name, s.row_offset, s.col_offset, s.weights.clone(), s.optimizer_state["sum"].clone())
        for s in shards
    ]


def put_together(found, column):
    """Whole tables from the pieces of all ranks: weights (3) or Adagrad's sums (4)."""
    tables = {name: torch.full(size[:2], torch.nan) for name, size in TABLES.items()}
    for piece in found:
        rows, cols = piece[column].shape
        tables[piece[0]][piece[1] : piece[1] + rows, piece[2] : piece[2] + cols] = piece[column]
    return tables


def main(folder):
    recovery = cpr.PartialRecovery(
        f"{folder}/checkpoint",
        save_every_steps=SAVE_EVERY,
        moment="consistent",
        total_samples=STEPS * GLOBAL_BATCH,
    )
    with recovery:
        recovery.init_process_group("gloo")
        with recovery.building():
            model, optimizer = sharded(LAYOUT)
        if not recovery.tables_adopted:
            for shard in find_shards(model):
                whole = values_of(shard.table_name)
                shard.weights.copy_(whole[slice(*shard.extent.rows), slice(*shard.extent.cols)])
        story = recovery.restore(model, optimizers=[optimizer])
        rank, world = dist.get_rank(), dist.get_world_size()
        if story.generation:
            (folder / f"story-{rank}.json").write_text(json.dumps(story.to_dict()))
        for step in range(recovery.batches_done, STEPS):
            optimizer.zero_grad()
            inputs = [
                jagged(step, rank, world, features_of(tables), weighted=name == "weighted")
                for name, tables in COLLECTIONS.items()
            ]
            model(*inputs).mean().backward()
            optimizer.step()
            if recovery.steps_done + 1 == KILL_AT and not story.generation:
                recovery.checkpointer.wait()  # what was saved is known, whatever the pace of the disk
                torch.save(pieces(find_shards(model, [optimizer])), folder / f"killed-{rank}.pt")
            recovery.step(GLOBAL_BATCH)
        torch.save(pieces(recovery.checkpointer.shards), folder / f"end-{rank}.pt")
        torch.save(model.module.dense.state_dict(), folder / f"dense-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
