"""Tables of every sharding type are found by name, as live memory."""

from copy import deepcopy

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    GlobalWeightDecayDefinition,
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.model_parallel import DMPCollection
from torchrec.modules.embedding_configs import DataType

from cpr.shards import create_state, dense_tensors, find_shards, table_groups
from tests.cpr.shards.models import DIM, bags, batch, sequences, shard

ROWS = {"a": 10, "b": 7, "c": 5, "d": 9}
LAYOUT = {"a": "tw", "b": "cw", "c": "dp", "d": "unfused", "e": "rw"}
TRAINABLE = {**ROWS, "e": 12}
STATE_SHAPES = {
    EmbOptimType.EXACT_SGD: lambda rows, cols: {},
    EmbOptimType.EXACT_ADAGRAD: lambda rows, cols: {"sum": (rows, cols)},
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: lambda rows, cols: {"sum": (rows,)},
}


def unfused_parameters(model):
    """Parameters without a fused optimizer, as users of TorchRec collect them."""
    return [
        parameter
        for parameter in model.parameters()
        if parameter.numel() and not hasattr(parameter, "_in_backward_optimizers")
    ]


@pytest.fixture
def model(world_of_one):
    return shard(LAYOUT, bags=bags(**TRAINABLE))


@pytest.mark.parametrize("optimizer", STATE_SHAPES)
def test_tables_of_every_kind_with_their_state(world_of_one, optimizer):
    model = shard({**LAYOUT, "f": "rw"}, optimizer, bags=bags(**TRAINABLE), seq=sequences(a=4, b=3, c=6))
    shards = find_shards(model)
    assert [(s.name, s.table_shape, tuple(s.weights.shape), s.replicated) for s in shards] == [
        ("bags.embedding_bags.a/r0-c0", (10, DIM), (10, DIM), False),
        ("bags.embedding_bags.b/r0-c0", (7, DIM), (7, DIM // 2), False),
        ("bags.embedding_bags.b/r0-c4", (7, DIM), (7, DIM // 2), False),
        ("bags.embedding_bags.c/r0-c0", (5, DIM), (5, DIM), True),
        ("bags.embedding_bags.d/r0-c0", (9, DIM), (9, DIM), False),
        ("bags.embedding_bags.e/r0-c0", (12, DIM), (12, DIM), False),
        ("seq.embeddings.a/r0-c0", (4, DIM), (4, DIM), False),
        ("seq.embeddings.b/r0-c0", (3, DIM), (3, DIM // 2), False),
        ("seq.embeddings.b/r0-c4", (3, DIM), (3, DIM // 2), False),
        ("seq.embeddings.c/r0-c0", (6, DIM), (6, DIM), True),
    ]
    for found in shards:
        is_fused = found.table_fqn[-1] in "abe"
        wanted = STATE_SHAPES[optimizer](found.num_rows, found.num_cols) if is_fused else {}
        assert {name: tuple(state.shape) for name, state in found.optimizer_state.items()} == wanted
        assert set(found.counters) == ({"iter", "learning_rate"} if is_fused else set())


def test_tables_of_the_same_name_in_different_modules(world_of_one):
    model = shard({"a": "tw", "b": "cw"}, left=bags(a=3, b=4), right=bags(a=5, b=6), seq=sequences(a=7))
    shards = {found.name: found for found in find_shards(model)}
    assert [found.num_rows for found in shards.values()] == [3, 4, 4, 5, 6, 6, 7]
    shards["left.embedding_bags.a/r0-c0"].weights.fill_(1.0)
    shards["right.embedding_bags.a/r0-c0"].weights.fill_(2.0)
    state = model.state_dict()
    for side, value in (("left", 1.0), ("right", 2.0)):
        (local,) = state[f"{side}.embedding_bags.a.weight"].local_shards()
        assert torch.all(local.tensor == value)


def test_names_and_offsets_are_those_of_the_state_dict(model):
    for found in find_shards(model):
        rows = torch.arange(found.row_offset, found.row_offset + found.num_rows)
        columns = torch.arange(found.col_offset, found.col_offset + found.num_cols)
        found.weights.copy_(rows.unsqueeze(1) * 100.0 + columns)
    state = model.state_dict()
    for name, count in TRAINABLE.items():
        tensor = state[f"bags.embedding_bags.{name}.weight"]
        whole = torch.full((count, DIM), torch.nan)
        if hasattr(tensor, "local_shards"):
            for part in tensor.local_shards():
                (row, column), (height, width) = part.metadata.shard_offsets, part.metadata.shard_sizes
                whole[row : row + height, column : column + width] = part.tensor
        else:
            whole.copy_(tensor)
        assert torch.equal(whole, torch.arange(count).unsqueeze(1) * 100.0 + torch.arange(DIM)), name


def test_names_are_relative_to_the_module(model):
    from_the_top = [found.name for found in find_shards(model)]
    assert [found.name for found in find_shards(model.module)] == from_the_top
    assert [f"bags.{found.name}" for found in find_shards(model.module.bags)] == from_the_top
    task = nn.ModuleDict({"net": model})
    assert [found.name for found in find_shards(task)] == [f"net.{name}" for name in from_the_top]


class Training:
    """A model with an ordinary optimizer for unfused parameters."""

    def __init__(self, make_optimizer, seed):
        torch.manual_seed(seed)
        self.model = shard(LAYOUT, bags=bags(**TRAINABLE))
        self.optimizer = make_optimizer(unfused_parameters(self.model))
        self.steps = 0

    def step(self):
        self.optimizer.zero_grad(set_to_none=False)
        self.model({"bags": batch(self.steps, 16, **TRAINABLE)}).square().mean().backward()
        self.optimizer.step()
        self.steps += 1

    def shards(self):
        return find_shards(self.model, [self.optimizer])


@pytest.mark.parametrize(
    ("make_optimizer", "state_names"),
    [
        (lambda parameters: torch.optim.Adagrad(parameters, lr=0.1), {"sum"}),
        (lambda parameters: torch.optim.Adam(parameters, lr=0.1), {"exp_avg", "exp_avg_sq"}),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), {"momentum_buffer"}),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), set()),
    ],
)
def test_columns_counters_and_dense_tensors_are_the_whole_state(world_of_one, make_optimizer, state_names):
    first, second = Training(make_optimizer, seed=1), Training(make_optimizer, seed=2)
    for _ in range(3):
        first.step()
    create_state(second.optimizer)
    sources, targets = first.shards(), second.shards()
    for source, target in zip(sources, targets, strict=True):
        assert source.name == target.name
        if source.table_fqn[-1] in "cd":
            assert set(source.optimizer_state) == state_names
        assert source.columns.keys() == target.columns.keys()
        for name, column in source.columns.items():
            target.columns[name].copy_(column)
        for name, counter in source.counters.items():
            target.counters[name].copy_(counter)
        target.invalidate()
    dense = dense_tensors(second.model)
    for name, tensor in dense_tensors(first.model).items():
        dense[name].copy_(tensor)
    # replaces the state's tensors, by the source's own if they are not copied
    second.optimizer.load_state_dict(deepcopy(first.optimizer.state_dict()))
    second.steps = first.steps
    before = [shard.weights.clone() for shard in sources]
    for _ in range(3):
        first.step()
        second.step()
    for source, target, old in zip(sources, targets, before, strict=True):
        assert not torch.equal(source.weights, old), "the views follow training"
        for name, column in source.columns.items():
            assert torch.equal(target.columns[name], column), (source.name, name)
        for name, counter in source.counters.items():
            assert torch.equal(target.counters[name], counter), (source.name, name)


def test_written_counters_are_used(world_of_one):
    model = shard({"a": "tw"}, bags=bags(a=10))
    (found,), (group,) = find_shards(model), table_groups(model)

    def step():
        model({"bags": batch(0, 4, a=10)}).sum().backward()

    step()
    assert found.counters["iter"].item() == 1
    found.counters["iter"].fill_(41)
    found.counters["learning_rate"].fill_(0.25)
    found.invalidate()
    assert group.emb_module.get_learning_rate() == 0.25
    step()
    assert found.counters["iter"].item() == group.emb_module.iter_cpu.item() == 42


COUNTED = {
    "weight_decay_mode": WeightDecayMode.COUNTER,
    "counter_based_regularization": CounterBasedRegularizationDefinition(),
}
DECAYED = {
    "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
    "global_weight_decay": GlobalWeightDecayDefinition(start_iter=0, lower_bound=0.0),
}


@pytest.mark.parametrize(
    ("fused", "states", "counters"),
    [
        (COUNTED, {"sum", "prev_iter", "row_counter"}, {"iter", "learning_rate", "max_counter"}),
        (DECAYED, {"sum", "prev_iter"}, {"iter", "learning_rate"}),
    ],
    ids=["counter", "global decay"],
)
def test_state_of_regularizers(world_of_one, fused, states, counters):
    (found,) = find_shards(shard({"a": "tw"}, fused=fused, bags=bags(a=10)))
    assert found.optimizer_state.keys() == states
    assert {tuple(state.shape) for state in found.optimizer_state.values()} == {(10,)}
    assert found.counters.keys() == counters
    assert {counter.dim() for counter in found.counters.values()} == {0}


def test_device_cache_is_flushed_and_invalidated(world_of_one, monkeypatch):
    calls = []
    for name in ("flush", "reset_cache_states"):
        monkeypatch.setattr(
            SplitTableBatchedEmbeddingBagsCodegen, name, lambda tbe, name=name: calls.append((tbe, name))
        )
    model = shard({"a": "tw", "c": "dp"}, bags=bags(a=10, c=3))
    fused, unfused = find_shards(model)
    modules = [group.emb_module for group in table_groups(model)]
    (tbe,) = [each for each in modules if isinstance(each, SplitTableBatchedEmbeddingBagsCodegen)]
    calls.clear()
    unfused.flush()
    unfused.invalidate()
    assert calls == []
    fused.flush()
    assert calls == [(tbe, "flush")]
    fused.invalidate()
    assert calls == [(tbe, "flush"), (tbe, "reset_cache_states")]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tables_are_found_on_their_device(world_of_one):
    shards = find_shards(shard(LAYOUT, device=torch.device("cuda", 0), bags=bags(**TRAINABLE)))
    assert {column.device.type for found in shards for column in found.columns.values()} == {"cuda"}


def test_model_without_tables_has_no_shards():
    assert find_shards(nn.Linear(2, 3)) == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (DMPCollection, "DMPCollection.* use DistributedModelParallel"),
        (ShardedManagedCollisionCollection, "^net.remap .* use an EmbeddingBagCollection without it"),
    ],
)
def test_unsupported_modules_are_refused(kind, message):
    class Bare(kind):
        def __init__(self):
            nn.Module.__init__(self)

    model = nn.ModuleDict({"net": nn.ModuleDict({"remap": Bare()})})
    with pytest.raises(ValueError, match=message):
        find_shards(model)


def test_unsupported_kernels_are_refused(world_of_one, monkeypatch):
    model = shard({"a": "tw", "b": "tw"}, bags=bags(a=10, b=3))
    (kernel,) = model.module.bags._lookups[0]._emb_modules
    monkeypatch.setattr(kernel, "_emb_module", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"bags\.embedding_bags\.a lives in a Linear.* compute kernel fused"):
        find_shards(model)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_half_precision_tables(world_of_one, data_type):
    collection = bags(a=10)
    collection.embedding_bag_configs()[0].data_type = data_type
    (found,) = find_shards(shard({"a": "tw"}, bags=collection))
    assert found.weights.dtype == {DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}[data_type]
    assert found.optimizer_state["sum"].dtype == torch.float32
    assert found.bytes_per_row == DIM * 2 + 4
