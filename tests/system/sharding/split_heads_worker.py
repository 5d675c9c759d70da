"""Two ranks with split heads of every kind, on which all that works on tables must work.

`main(FOLDER)` is run by workers under torchrun. The first generation looks at the tables in every way, trains
and kills itself; the second writes down what it has found in memory, and trains on until its last worker
loses its memory with its life; so does the third, to the end.
"""

import copy
import os
import shutil
import signal
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

import cpr
from cpr.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from cpr.priority import Prioritizer, PriorityConfig
from cpr.shards import dense_tensors, find_shards
from data.dataset import Feature
from dlrm.config.schema import DenseConfig
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.models.deepfm import DeepFMHead
from dlrm.models.dlrm import DotHead
from dlrm.models.fm import LinearHead
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.splitting.layout import split_plan
from dlrm.sharding.splitting.operator_tables import make_operator_sharder
from dlrm.sharding.splitting.rows import RowSplitSharder
from dlrm.sharding.splitting.sharded import HeadSharder
from tests.system.recovery.recovery_worker import values

FEATURES = [Feature(name=name, rows=rows) for name, rows in (("a", 40), ("b", 9), ("c", 30), ("d", 1))]
DIM = 8
BATCH = 8
WAYS = {"dot": "columns", "wide": "tables", "far": "rows", "tiny": "rows"}
"""How each head is split. Of tiny's one row, the second rank has nothing; of far's last table too."""
DEEP = {"deep": "tables"}
"""This head keeps operator weights in tables too, which exist only when it is split."""
RANKS = 2
ALL = PriorityConfig(scheme="touched", ratio=1.0, covering=1.0)
SAVE_EVERY = 4
FAIL_AT, LOSE_AT, END_AT = 6, 11, 13
SAVED_AT = LOSE_AT // SAVE_EVERY * SAVE_EVERY
"""The last save before a memory is lost."""


class Model(nn.Module):
    """A head for each way to split one, between dense layers.

    Args:
        deep: whether there is also one with weights.
    """

    def __init__(self, deep):
        super().__init__()
        self.dot = DotHead(FEATURES, DIM, torch.float32)
        self.wide = LinearHead(FEATURES, prefix="linear_")
        self.far = LinearHead(FEATURES, prefix="far_")
        self.tiny = LinearHead(FEATURES[3:], prefix="tiny_")
        self.bottom = nn.Linear(3, DIM)
        self.dense = nn.Linear(self.dot.out_features, 1)
        self.deep = DeepFMHead(FEATURES, 3, DIM, (6, 1), torch.float32) if deep else None

    def forward(self, dense, sparse):
        linear = self.wide(sparse) + self.far(sparse) + self.tiny(sparse)
        out = self.dense(self.dot(sparse, self.bottom(dense))) + linear
        return out if self.deep is None else out + self.deep(sparse, dense).unsqueeze(1)


def build(split, deep=False):
    """The model, its heads split, or only its tables sharded."""
    torch.manual_seed(5)
    model = Model(deep)
    tables = RowSplitSharder(
        {"optimizer": TABLE_OPTIMIZERS["rowwise_adagrad"].fbgemm_type, "learning_rate": 0.1}
    )
    operators = make_operator_sharder(DenseConfig(optimizer="adagrad"), torch.device("cpu"))
    plan = {}
    for name, way in (WAYS | DEEP if deep else WAYS).items():
        head = model.get_submodule(name)
        if split:
            plan[name] = split_plan(head, way, [1] * len(head.names), tables, (RANKS, RANKS), "cpu")
        else:
            first = {
                table.name: table_wise(rank=0, compute_kernel="fused")
                for table in head.tables.embedding_bag_configs()
            }
            plan[f"{name}.tables"] = construct_module_sharding_plan(
                head.tables, first, tables, RANKS, RANKS, "cpu"
            )
    kinds = (DotHead, LinearHead, DeepFMHead)
    sharders = [*(HeadSharder(kind, tables, operators=operators) for kind in kinds), tables]
    return DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan(plan), sharders=sharders
    )


def batch(number):
    """Of this rank."""
    generator = torch.Generator().manual_seed(RANKS * number + dist.get_rank())
    ids = [torch.randint(0, feature.rows, (2 * BATCH,), generator=generator) for feature in FEATURES]
    sparse = KeyedJaggedTensor(
        keys=[feature.name for feature in FEATURES],
        values=torch.cat(ids),
        lengths=torch.full((BATCH * len(FEATURES),), 2),
    )
    return torch.randn(BATCH, 3, generator=generator), sparse


def train(model, numbers):
    for number in numbers:
        model(*batch(number)).square().mean().backward()


def columns(model):
    """Copies of all that is in this rank's tables."""
    return {
        (shard.name, name): column.clone()
        for shard in find_shards(model)
        for name, column in shard.columns.items()
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for key, column in found.items():
        assert torch.equal(column, expected[key]), key


def tables_are_where_they_belong(model):
    """Each row and column on one rank, and each head split as it was told to be."""
    of_all = [None] * RANKS
    own = [
        (s.table_fqn, s.table_shape, s.row_offset, s.col_offset, s.num_rows, s.num_cols)
        for s in find_shards(model)
    ]
    dist.all_gather_object(of_all, own)
    covered = {}
    for fqn, shape, row, column, num_rows, num_cols in chain.from_iterable(of_all):
        cells = covered.setdefault(fqn, torch.zeros(shape))
        cells[row : row + num_rows, column : column + num_cols] += 1
        way = WAYS[fqn.partition(".")[0]]
        assert num_rows == shape[0] or (way == "rows" and num_rows <= -(-shape[0] // RANKS)), fqn
        assert num_cols == (shape[1] // RANKS if way == "columns" else shape[1]), fqn
    assert len(covered) == 3 * len(FEATURES) + 1
    assert all(bool((cells == 1).all()) for cells in covered.values())


def state_dicts_come_back(model, plain):
    """By TorchRec's own means: weights, dense parameters, fused optimizers; named as without splitting."""
    assert model.state_dict().keys() == plain.state_dict().keys()
    train(model, range(2))
    before, dense = columns(model), copy.deepcopy(dense_tensors(model))
    state, optimizer = copy.deepcopy((model.state_dict(), model.fused_optimizer.state_dict()))
    train(model, range(2, 4))
    with torch.no_grad():
        for tensor in dense_tensors(model).values():
            tensor.add_(1.0)
    assert not any(torch.equal(column, before[key]) for key, column in columns(model).items())
    model.load_state_dict(state)
    model.fused_optimizer.load_state_dict(optimizer)
    assert_same(columns(model), before)
    assert_same(dense_tensors(model), dense)


def checkpoints_load_into_any_layout(model, plain, folder):
    with Checkpointer(model, CheckpointConfig(uri=str(folder / "split"))) as checkpointer:
        checkpointer.save("consistent")
        checkpointer.wait()
        before = columns(model)
        expected = model(*batch(9)).detach()
        train(model, range(3))
        checkpointer.load()
    assert_same(columns(model), before)
    with Checkpointer(plain, CheckpointConfig(uri=str(folder / "split"))) as checkpointer:
        checkpointer.load()
    torch.testing.assert_close(plain(*batch(9)), expected, rtol=1e-5, atol=1e-6)


def lookups_are_counted(model):
    """Rows to be saved are those that any rank has looked up."""
    with Prioritizer(model, ALL) as prioritizer:
        prioritizer.begin_full_save()
        prioritizer.confirm()
        train(model, range(1))
        _, sparse = batch(0)
        looked_up = {}
        for feature in FEATURES:
            counts = torch.bincount(sparse[feature.name].values(), minlength=feature.rows)
            dist.all_reduce(counts)
            looked_up[feature.name] = counts
        chosen = prioritizer.rows_to_save()
        for shard in find_shards(model):
            counts = looked_up[shard.table_fqn[-1]][shard.row_offset : shard.row_offset + shard.num_rows]
            expected = counts.nonzero().view(-1) + shard.row_offset
            assert torch.equal(chosen[shard.name], expected), shard.name


def any_model_may_have_rows(wire_dtype, tolerance):
    """Planned by TorchRec: mean pooling, a table of two features, and one of another width."""
    features = ("f", "g", "h")
    configs = [
        EmbeddingBagConfig(
            name="few", num_embeddings=5, embedding_dim=8, feature_names=["f"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(name="many", num_embeddings=21, embedding_dim=4, feature_names=["g", "h"]),
    ]
    torch.manual_seed(3)
    whole = EmbeddingBagCollection(tables=configs)
    fused = {"optimizer": TABLE_OPTIMIZERS["sgd"].fbgemm_type, "learning_rate": 1.0}
    sharder = RowSplitSharder(fused, wire_dtype=wire_dtype)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=RANKS, compute_device="cpu"),
        constraints={config.name: ParameterConstraints(sharding_types=["row_wise"]) for config in configs},
    )
    model = nn.Sequential(EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    sharded = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    weights = {config.name: whole.embedding_bags[config.name].weight for config in configs}
    for shard in find_shards(sharded):
        rows = slice(shard.row_offset, shard.row_offset + shard.num_rows)
        shard.weights.copy_(weights[shard.table_fqn.rpartition(".")[2]].detach()[rows])
    generator = torch.Generator().manual_seed(4)
    batches = []
    for _ in range(RANKS):
        lengths = torch.randint(0, 4, (3 * BATCH,), generator=generator)
        ids = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
        batches.append(KeyedJaggedTensor(keys=list(features), values=ids, lengths=lengths))
    expected = [whole(batch).values() for batch in batches]
    found = sharded(batches[dist.get_rank()]).values()
    wanted = expected[dist.get_rank()]
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    assert wire_dtype is None or float((found - wanted).abs().max()) > 1e-4, "rounded on the way"
    torch.cat(expected).square().mean().backward()
    found.square().mean().backward()
    for shard in find_shards(sharded):
        rows = slice(shard.row_offset, shard.row_offset + shard.num_rows)
        weight = weights[shard.table_fqn.rpartition(".")[2]]
        torch.testing.assert_close(
            shard.weights, (weight - weight.grad).detach()[rows], rtol=tolerance, atol=tolerance
        )


@dataclass
class Batch(Pipelineable):
    """What a rank gets in a step."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor

    def to(self, device, non_blocking=False):
        return self

    def record_stream(self, stream):
        pass


class WithLoss(nn.Module):
    """A model as TorchRec's pipelines want it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        out = self.model(batch.dense, batch.sparse)
        return out.square().mean(), out


def pipelines_change_nothing(model):
    """The id exchange of heads without a dense input runs ahead; all rows are what they are without it."""
    other = build(split=True)
    other.load_state_dict(model.state_dict())
    other.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
    train(model, range(6))
    batches = iter([Batch(*batch(number)) for number in range(6)])
    # no dense parameter is updated here
    optimizer = torch.optim.SGD(dense_parameters(other), lr=0.0)
    pipeline = TrainPipelineSparseDist(WithLoss(other.module), optimizer, torch.device("cpu"))
    for _ in range(6):
        pipeline.progress(batches)
    assert len(pipeline._pipelined_modules) == 3
    assert_same(columns(other), columns(model))


def look_at_tables(folder):
    """In every way."""
    model, plain = build(split=True), build(split=False)
    tables_are_where_they_belong(model)
    state_dicts_come_back(model, plain)
    checkpoints_load_into_any_layout(model, plain, folder)
    lookups_are_counted(model)
    pipelines_change_nothing(model)
    any_model_may_have_rows(None, 1e-6)
    any_model_may_have_rows(torch.bfloat16, 2**-7)


def main(folder):
    folder = Path(folder)
    torch.set_num_threads(1)
    recovery = cpr.PartialRecovery(
        str(folder / "checkpoint"),
        save_every_steps=SAVE_EVERY,
        priority=ALL,
        moment="consistent",
        total_samples=1000 * BATCH,
    )
    with recovery:
        recovery.init_process_group("gloo")
        rank, generation = dist.get_rank(), recovery._worker_group.generation
        with recovery.building():
            model = build(split=True, deep=True)
        if not generation:
            look_at_tables(folder)
        optimizer = torch.optim.Adagrad(dense_parameters(model), lr=0.1)
        recovery.restore(model, optimizers=[optimizer])
        torch.save(values(recovery, model), folder / f"begin-{generation}-{rank}.pt")
        while recovery.steps_done < (FAIL_AT, LOSE_AT, END_AT)[generation]:
            optimizer.zero_grad()
            train(model, [recovery.batches_done])
            optimizer.step()
            recovery.step(samples=BATCH * RANKS)
            if recovery.steps_done == SAVED_AT:
                recovery.checkpointer.wait_until_idle()
                torch.save(values(recovery, model), folder / f"saved-{rank}.pt")
        torch.save(values(recovery, model), folder / f"alive-{generation}-{rank}.pt")
        if generation < 2:
            die(recovery, alone=generation == 1)
    (folder / f"end-{rank}").touch()
    dist.destroy_process_group()


def die(recovery, alone):
    """All at once; or the last one `alone`, and its memory with it."""
    dist.barrier()
    if alone and dist.get_rank() == RANKS - 1:
        shutil.rmtree(recovery._memory.segment.folder)
    if not alone or dist.get_rank() == RANKS - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()  # the others find out here
