"""Weights as tables: values, updates as by the dense optimizer, and that who looks for tables finds them."""

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adagrad
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.types import ShardingEnv

from cpr.shards import before_updates, find_shards, table_groups
from cpr.shards.lookups import watch_lookups
from data.dataset import Feature
from dlrm.config import DenseConfig
from dlrm.models.linear import LinearHead
from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.splitting.operator_tables import OperatorTables, Placement, make_operator_sharder
from dlrm.sharding.tables import initialize_tables

FEATURES = tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((50, 7, 300)))
NAMES = [feature.name for feature in FEATURES]
ROWS = 8
CPU = torch.device("cpu")
OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad}


@pytest.fixture
def place(world_of_one):
    """Operator tables of a weight, all fields being on this rank."""

    def work(weight, optimizer="sgd", names=NAMES):
        dense = DenseConfig(optimizer=optimizer, learning_rate=0.1)
        sharder = make_operator_sharder(dense, CPU)
        tables = dict(LinearHead(FEATURES).tables.embedding_bags.items())
        fields = {
            name: table_wise(rank=0, compute_kernel="fused")(tables[name].weight, 1, 1, "cpu", sharder)
            for name in names
        }
        placement = Placement(
            fields=fields,
            names=names,
            sharder=sharder,
            env=ShardingEnv.from_process_group(dist.group.WORLD),
            device=CPU,
        )
        operator = OperatorTables("first_", weight, placement)
        initialize_tables(operator, seed=0)
        return operator

    return work


@pytest.mark.parametrize("columns", [1, 4, 6, 16])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learns_like_the_dense_parameter(optimizer, columns, place):
    torch.manual_seed(0)
    initial = torch.randn(len(FEATURES) * ROWS, columns)
    expected = torch.nn.Parameter(initial.clone())
    dense = OPTIMIZERS[optimizer]([expected], lr=0.1)
    operator = place(initial, optimizer)
    assert torch.equal(operator.weight().detach(), initial)
    for _ in range(20):
        x = torch.randn(5, len(initial))
        for weight in (expected, operator.weight()):
            (x @ weight).square().mean().backward()
        dense.step()
        dense.zero_grad()
        torch.testing.assert_close(operator.weight().detach(), expected.detach(), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(operator.weight(), initial)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_fbgemm_itself_reads_and_updates_the_same(optimizer, place):
    """What stands in for it on the CPU is faster, nothing else; on a GPU there is FBGEMM alone."""
    torch.manual_seed(0)
    initial = torch.randn(len(FEATURES) * ROWS, 12)
    ours, fbgemm = place(initial, optimizer), place(initial, optimizer)
    for group in table_groups(fbgemm):
        del group.emb_module.forward
    for _ in range(5):
        x = torch.randn(5, len(initial))
        results = [x @ operator.weight() for operator in (ours, fbgemm)]
        torch.testing.assert_close(*results)
        for result in results:
            result.square().mean().backward()
    for found, wanted in zip(find_shards(ours), find_shards(fbgemm), strict=True):
        torch.testing.assert_close(found.weights, wanted.weights)
        torch.testing.assert_close(dict(found.optimizer_state), dict(wanted.optimizer_state))


def test_are_found_as_tables_and_survive_a_round_trip(place):
    initial = torch.arange(float(len(FEATURES) * ROWS * 6)).view(-1, 6)
    operator = place(initial, "adagrad")
    names = [f"tables.embedding_bags.first_{name}" for name in NAMES]
    shards = find_shards(operator)
    assert [shard.table_fqn for shard in shards] == names
    assert {shard.table_shape for shard in shards} == {(ROWS, 8)}
    assert all(list(shard.optimizer_state) == ["sum"] for shard in shards)
    saved = {name: value.detach().clone() for name, value in _state(operator).items()}
    assert list(saved) == [f"{name}.weight" for name in names]
    assert all(not value[:, 6:].any() for value in saved.values())  # what fills them up
    operator.weight().sum().backward()
    assert not torch.equal(operator.weight(), initial)
    assert all(not shard.weights[:, 6:].any() for shard in shards)
    for name, value in _state(operator).items():
        value.copy_(saved[name])
    assert torch.equal(operator.weight(), initial)


def _state(operator):
    return {name: value.local_shards()[0].tensor for name, value in operator.state_dict().items()}


def test_whoever_watches_tables_is_told(place):
    operator = place(torch.randn(len(FEATURES) * ROWS, 4))
    lookups, updates = [], []
    with (
        watch_lookups(list(table_groups(operator)), lambda _, seen: lookups.append(seen.rows.tolist())),
        before_updates(operator, [], lambda: updates.append(find_shards(operator)[0].weights.clone())),
    ):
        before = find_shards(operator)[0].weights.clone()
        operator.weight().sum().backward()
    assert lookups == [list(range(len(FEATURES) * ROWS))]  # every row
    assert len(updates) == 1
    assert torch.equal(updates[0], before)


def test_the_host_lookup_leaves_them_alone(place):
    initial = torch.randn(len(FEATURES) * ROWS, 4)
    operator = place(initial)
    assert use_host_lookups([group.emb_module for group in table_groups(operator)], torch.bfloat16) == 0
    assert torch.equal(operator.weight(), initial)


def test_a_rank_without_fields_takes_part(place):
    """Its backward pass runs, for other ranks wait for it there."""
    operator = place(torch.randn(len(FEATURES) * ROWS, 6))
    operator._tbe.clear()
    partial = torch.zeros(3, 0) @ operator.weight()
    assert partial.shape == (3, 6)
    assert not partial.any()
    partial.sum().backward()


def test_adam_is_refused_where_fbgemm_lacks_it():
    adam = DenseConfig(optimizer="adam")
    with pytest.raises(ValueError, match="FBGEMM updates tables by adagrad, sgd alone; choose one of those"):
        make_operator_sharder(adam, CPU)
    assert make_operator_sharder(adam, torch.device("cuda")).fused_params["eps"] == 1e-8
