"""Operator weights in tables: values, updates by the dense optimizer, listing as tables."""

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, Adagrad
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from cpr.shards import before_updates, find_shards, table_groups
from cpr.shards.lookups import watch_lookups
from data.dataset import Feature
from dlrm.config.schema import DenseConfig, ScheduleConfig, TablesConfig
from dlrm.models.contract import ModelInputs
from dlrm.models.deepfm import DeepFM, DeepFMHead
from dlrm.models.fm import LinearHead
from dlrm.optim.build import Optimizers
from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.plan import make_sharder
from dlrm.sharding.splitting.operator_tables import OperatorTables, Placement, make_operator_sharder
from dlrm.sharding.splitting.sharded import HeadSharder
from dlrm.sharding.tables import initialize_tables

FEATURES = tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((50, 7, 300)))
NAMES = [feature.name for feature in FEATURES]
ROWS = 8
CPU = torch.device("cpu")
OPTIMIZERS = {"sgd": SGD, "adagrad": Adagrad}


def on_rank_0(collection, sharder):
    """A plan of its tables."""
    places = {
        table.name: table_wise(rank=0, compute_kernel="fused") for table in collection.embedding_bag_configs()
    }
    return construct_module_sharding_plan(
        collection, places, sharder, local_size=1, world_size=1, device_type="cpu"
    )


@pytest.fixture
def place(world_of_one):
    """Operator tables of a weight, all fields being on this rank."""

    def work(weight, optimizer="sgd"):
        dense = DenseConfig(optimizer=optimizer, learning_rate=0.1)
        sharder = make_operator_sharder(dense, CPU)
        tables = LinearHead(FEATURES).tables
        placement = Placement(
            fields=dict(on_rank_0(tables, sharder)),
            names=NAMES,
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
def test_operator_tables_learn_like_the_dense_parameter(optimizer, columns, place):
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


def test_operator_tables_are_listed_saved_and_loaded_as_tables(place):
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


def test_operator_tables_call_lookup_and_update_hooks(place):
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


def test_the_host_lookup_does_not_replace_operator_tables(place):
    initial = torch.randn(len(FEATURES) * ROWS, 4)
    operator = place(initial)
    assert use_host_lookups([group.emb_module for group in table_groups(operator)], torch.bfloat16) == 0
    assert torch.equal(operator.weight(), initial)


def test_a_rank_without_fields_joins_the_backward_pass(place):
    """Its backward pass runs, for other ranks wait for it there."""
    operator = place(torch.randn(len(FEATURES) * ROWS, 6))
    operator._tbe.clear()
    partial = torch.zeros(3, 0) @ operator.weight()
    assert partial.shape == (3, 6)
    assert not partial.any()
    partial.sum().backward()


@pytest.fixture
def model(world_of_one):
    """DeepFM, whose head is split although there is one rank."""
    inputs = ModelInputs(features=FEATURES, dense=("a", "b", "c"), dtype=torch.float32, embedding_dim=4)
    model = DeepFM({"top_mlp": (6, 1)}, inputs)
    tables = make_sharder(TablesConfig(learning_rate=0.5))
    operators = make_operator_sharder(DenseConfig(optimizer="sgd", learning_rate=0.25), CPU)
    return DistributedModelParallel(
        model,
        device=CPU,
        plan=ShardingPlan(
            {
                "sparse": on_rank_0(model.sparse.tables, tables),
                "wide.tables": on_rank_0(model.wide.tables, tables),
            }
        ),
        sharders=[HeadSharder(DeepFMHead, tables, operators=operators), tables],
        init_data_parallel=False,
    )


def test_operator_tables_follow_the_dense_learning_rate(model):
    schedule = ScheduleConfig(warmup_steps=4)
    optimizers = Optimizers(
        model, DenseConfig(optimizer="sgd", learning_rate=0.25), TablesConfig(learning_rate=0.5), schedule
    )
    for step, factor in enumerate((0.25, 0.5, 0.75, 1.0, 1.0)):
        optimizers.begin_step(step)
        rates = {
            group.tables[0].table_fqn.rsplit(".", 2)[0]: group.emb_module.get_learning_rate()
            for group in table_groups(model)
        }
        assert rates == {
            "sparse.tables": 0.5 * factor,
            "sparse.first.tables": 0.25 * factor,
            "wide.tables": 0.5 * factor,
        }


def test_operator_weights_are_tables_and_not_dense_parameters(model):
    names = {f"sparse.first.tables.embedding_bags.first_{name}.weight" for name in NAMES}
    assert names <= {f"{shard.table_fqn}.weight" for shard in find_shards(model)}
    assert names <= model.state_dict().keys()
    assert names <= {
        f"sparse.first.tables.{name}" for name in model.module.sparse.first.tables.fused_optimizer.params
    }
    dense = {id(parameter) for parameter in dense_parameters(model)}
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if id(parameter) in dense}
    assert shapes == {
        "wide_dense.weight": (1, 3),
        "wide_dense.bias": (1,),
        "sparse.deep.hidden.0.weight": (6, 3),
        "sparse.deep.hidden.0.bias": (6,),
        "sparse.deep.logit.weight": (1, 6),
        "sparse.deep.logit.bias": (1,),
    }


def test_adopted_rows_are_not_initialized(model):
    """Rows that a worker has left in memory are used as they are; those of the seed are forgotten."""
    (group,) = table_groups(model.module.sparse.first)
    for table in group.tables:
        table.weights.fill_(7.0)
    assert torch.equal(model.module.sparse.first.weight(), torch.full((len(FEATURES) * 4, 6), 7.0))
    assert model.module.sparse.first._initial is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, r"by adam; set dense.optimizer to one of adagrad, sgd, or"),
        # which would be too late for weights that are updated in the backward pass
        (
            {"optimizer": "sgd", "clip_norm": 1.0},
            r"set dense\.clip_norm to 0, or sharding\.strategy to torchrec",
        ),
        (
            {"optimizer": "sgd", "momentum": 0.9},
            r"set dense\.momentum to 0, or sharding\.strategy to torchrec",
        ),
    ],
)
def test_what_operator_tables_cannot_do_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_operator_sharder(DenseConfig(**options), CPU)
    on_gpu = make_operator_sharder(DenseConfig(optimizer="adam"), torch.device("cuda"))
    assert on_gpu.fused_params["eps"] == 1e-8
