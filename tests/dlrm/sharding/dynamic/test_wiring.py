"""Models with dynamic tables from a configuration: plans, and heads that may be split."""

from types import SimpleNamespace

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import find_shards
from data.criteo import DENSE_NAMES
from data.dataset import Feature
from dlrm.config.schema import Config, ModelConfig, ShardingConfig, TablesConfig
from dlrm.models.build import build_model
from dlrm.sharding.plan import make_plan, make_sharder
from dlrm.sharding.splitting.planning import planner
from dlrm.sharding.splitting.planning.shapes import PlanSetting, heads_of, shapes_of
from dlrm.training import build
from dlrm.training.data import _check_tables
from tests.dlrm.inputs import fake_inputs

FEATURES = (Feature(name="cat_0", rows=0), Feature(name="cat_1", rows=300), Feature(name="cat_2", rows=5000))
CPU = torch.device("cpu")
OF_DYNAMIC = {"dynamic_rows": 40, "admit_after": 2}


def config_of(*dynamic, strategy="torchrec", kind="dlrm"):
    return Config(
        model=ModelConfig(kind=kind, embedding_dim=32, bottom_mlp=(8, 32), top_mlp=(8, 1)),
        tables=TablesConfig(dynamic=dynamic, **(OF_DYNAMIC if dynamic else {})),
        sharding=ShardingConfig(strategy=strategy, kinds=("column_wise",)),
    )


@pytest.mark.parametrize("initialize", [True, False])
def test_a_dynamic_table_is_whole_and_the_others_are_as_planned(world_of_one, initialize):
    model = build.shard(fake_inputs(config_of("cat_0"), FEATURES), initialize=initialize)
    kinds = {name: sharding.sharding_type for name, sharding in model.plan.plan["sparse.tables"].items()}
    assert kinds == {"cat_0": "table_wise", "cat_1": "column_wise", "cat_2": "column_wise"}
    dynamic = find_shards(model)[0]
    assert dynamic.table_shape == (40, 32)
    assert set(dynamic.columns) == {"weights", "sum", "id", "last_seen", "candidate", "sightings"}
    ids = torch.tensor([-(2**63), 2**63 - 1, 2, 2, 0, 1])
    sparse = KeyedJaggedTensor(
        keys=["cat_0", "cat_1", "cat_2"], values=ids, lengths=torch.ones(6, dtype=torch.int64)
    )
    for _ in range(2):
        model(torch.ones(2, 13), sparse.to(CPU)).sum().backward()
    assert dynamic.columns["id"][:3].tolist() == [-(2**63), 2**63 - 1, 0]
    assert dynamic.columns["last_seen"][:3].tolist() == [2, 2, 0]


@pytest.mark.parametrize(
    ("kind", "dynamic", "strategy", "refused"),
    [
        ("dlrm", ("cat_0",), "des", True),  # split by columns
        ("dlrm", (), "des", False),
        ("deepfm", ("cat_0",), "des", False),  # split by tables
        ("deepfm", ("*",), "auto", True),  # which might choose rows
        ("deepfm", (), "auto", False),
    ],
)
def test_heads_of_dynamic_tables_are_split_by_tables_or_not_at_all(
    world_of_one, kind, dynamic, strategy, refused
):
    config = config_of(*dynamic, strategy=strategy, kind=kind)
    features = [Feature(name=feature.name, rows=300) for feature in FEATURES]
    model = build_model(config.model, features, DENSE_NAMES, torch.float32)
    sharder = make_sharder(config.tables)
    plan = make_plan(model, sharder, ShardingConfig(), CPU, 16)
    setting = PlanSetting(num_ranks=2, ids={}, dense=config.dense, device=CPU)
    shape = next(each for each in shapes_of(model, plan, sharder, setting) if each.path == "sparse")
    kept = planner._keep_dynamic_whole(shape, heads_of(model)["sparse"], config)
    assert shape.refusal == ""
    assert ("must each be whole" in kept.refusal) == refused


@pytest.mark.parametrize(
    ("dynamic", "message"),
    [
        (("cat_0", "cat_7"), "tables.dynamic names cat_7, which the data lacks; .* cat_0, cat_1, cat_2"),
        (("cat_1",), "cat_0 has raw ids, .* name it in tables.dynamic"),
        ((), "cat_0 has raw ids"),
    ],
)
def test_dynamic_features_must_match_the_data(dynamic, message):
    with pytest.raises(ValueError, match=message):
        _check_tables(config_of(*dynamic), SimpleNamespace(features=FEATURES))


def test_max_rows_does_not_apply_to_dynamic_tables():
    config = Config(tables=TablesConfig(dynamic=("cat_0", "cat_2"), max_rows=1000))
    _check_tables(config, SimpleNamespace(features=FEATURES))
