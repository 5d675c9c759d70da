"""The trainer's tables as `cpr.shards` lists them."""

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from cpr.shards import dense_tensors, find_shards
from dlrm.config.schema import DenseConfig, ModelConfig, ScheduleConfig, TablesConfig
from dlrm.config.table_optimizers import ROW_OPTIMIZERS, TABLE_OPTIMIZERS
from dlrm.optim.build import Optimizers, ReplicatedTables
from dlrm.sharding.parameters import dense_parameters

KINDS = {"cat_0": "data_parallel", "cat_1": "data_parallel", "cat_2": "column_wise", "cat_3": "table_wise"}


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_replicated_tables_have_the_state_that_sharded_ones_have(optimizer, shard_model):
    tables = TablesConfig(optimizer=optimizer)
    model = shard_model(KINDS, tables=tables)
    replicated = ReplicatedTables(model, tables).optimizer
    shards = find_shards(model, [replicated])
    assert [(s.name.rpartition(".")[2], tuple(s.weights.shape), s.replicated) for s in shards] == [
        ("cat_0/r0-c0", (50, 8), True),
        ("cat_1/r0-c0", (7, 8), True),
        ("cat_2/r0-c0", (300, 4), False),
        ("cat_2/r0-c4", (300, 4), False),
        ("cat_3/r0-c0", (24, 8), False),
    ]
    for found in shards:
        shapes = {name: tuple(state.shape) for name, state in found.optimizer_state.items()}
        expected = TABLE_OPTIMIZERS[optimizer].state
        assert shapes == {name: shape(found.num_rows, found.num_cols) for name, shape in expected.items()}
    (tall,) = replicated.param_groups[0]["params"]
    for state in replicated.state[tall].values():
        if state is not None and state.dim():
            state.copy_(torch.arange(state.numel()).view_as(state))
    if optimizer != "sgd":
        first, second = (found.optimizer_state["sum"].reshape(-1) for found in shards[:2])
        assert torch.equal(torch.cat([first, second]), torch.arange(len(first) + len(second)).float())


@pytest.mark.parametrize("kind", ["dlrm", "deepfm"])
def test_names_cover_the_state_dict(kind, shard_model):
    config = ModelConfig(kind=kind, embedding_dim=8, bottom_mlp=(16, 8), top_mlp=(16, 1))
    model = shard_model(KINDS, model=config)
    tables = {f"{found.table_fqn}.weight" for found in find_shards(model)}
    dense = dense_tensors(model)
    assert dense.keys() | tables == model.state_dict().keys()
    assert not dense.keys() & tables
    assert {tensor.data_ptr() for tensor in dense.values()} == {
        parameter.data_ptr() for parameter in dense_parameters(model)
    }


@pytest.mark.parametrize("optimizer", ROW_OPTIMIZERS)
def test_copied_rows_continue_training_identically(optimizer, shard_model, make_batch):
    """Another model, given the shards' rows and the dense tensors, does the same steps bit for bit."""
    tables = TablesConfig(optimizer=optimizer, learning_rate=0.05)
    models = [shard_model(KINDS, tables=tables) for _ in range(2)]
    optimizers = [Optimizers(m, DenseConfig(optimizer="sgd"), tables, ScheduleConfig()) for m in models]
    replicated = [[each._replicated.optimizer] for each in optimizers]
    first, second = (find_shards(m, own) for m, own in zip(models, replicated, strict=True))

    def step(which, number):
        batch = make_batch(16, number, multi_hot=True)
        optimizers[which].begin_step(number)
        outputs = models[which](batch.dense, batch.sparse)
        binary_cross_entropy_with_logits(outputs, batch.labels).backward()
        optimizers[which].step()

    for number in range(3):
        step(0, number)
    assert not torch.equal(first[0].weights, second[0].weights)
    for source, target in zip(first, second, strict=True):
        for name, column in source.columns.items():
            target.columns[name].copy_(column)
        for name, counter in source.counters.items():
            target.counters[name].copy_(counter)
        target.invalidate()
    dense = dense_tensors(models[1])
    for name, tensor in dense_tensors(models[0]).items():
        dense[name].copy_(tensor)
    for number in range(3, 6):
        step(0, number)
        step(1, number)
    for source, target in zip(first, second, strict=True):
        for name, column in source.columns.items():
            assert torch.equal(target.columns[name], column), (source.name, name)
