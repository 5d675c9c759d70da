"""Sharding plans under the configuration's constraints, refusals, and the printed plan."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from data.criteo import DENSE_NAMES
from data.dataset import Feature
from dlrm.config.schema import SHARDING_KINDS, ModelConfig, ShardingConfig, TablesConfig
from dlrm.models.build import build_model
from dlrm.sharding import plan
from dlrm.sharding.plan import (
    _constraints,
    check_tables,
    format_plan,
    make_plan,
    make_sharder,
)

CPU = torch.device("cpu")


def model_of(features, dim=32):
    config = ModelConfig(embedding_dim=dim, bottom_mlp=(8, dim), top_mlp=(8, 1))
    return build_model(config, features, DENSE_NAMES, torch.float32)


def plan_of(model, config=ShardingConfig()):  # noqa: B008  # frozen
    return make_plan(model, make_sharder(TablesConfig()), config, CPU, 16)


def kinds_of(features, config, world_size, dim=32):
    constraints = _constraints(model_of(features, dim), config, world_size)
    return {name: constraint.sharding_types for name, constraint in constraints.items()}


def test_small_tables_are_replicated_on_several_ranks_only(features):
    config = ShardingConfig(data_parallel_rows=50)
    sharded = ["table_wise", "column_wise"]
    assert kinds_of(features, config, world_size=2) == {
        "cat_0": ["data_parallel"],  # exactly 50 rows
        "cat_1": ["data_parallel"],
        "cat_2": sharded,
        "cat_3": ["data_parallel"],
    }
    assert set(map(tuple, kinds_of(features, config, world_size=1).values())) == {tuple(sharded)}


@pytest.mark.parametrize(("dim", "cut"), [(28, False), (32, True)])
def test_columns_are_cut_where_two_pieces_are_wide_enough(features, dim, cut):
    config = ShardingConfig(data_parallel_rows=0, min_column_dim=16)
    for kinds in kinds_of(features, config, 2, dim).values():
        assert ("column_wise" in kinds) == cut
        assert "table_wise" in kinds
    only = ShardingConfig(data_parallel_rows=0, kinds=("column_wise",))
    assert set(map(tuple, kinds_of(features, only, 2, dim=8).values())) == {("column_wise",)}


def test_both_collections_of_deepfm_are_planned(features):
    model = build_model(
        ModelConfig(kind="deepfm", embedding_dim=16, top_mlp=(8, 1)), features, DENSE_NAMES, torch.float32
    )
    names = set(_constraints(model, ShardingConfig(), 2))
    assert names == {f"{prefix}cat_{i}" for prefix in ("", "linear_") for i in range(4)}


@pytest.mark.parametrize("kind", ["table_wise", "column_wise"])
def test_the_plan_is_formatted_as_a_table_largest_first(world_of_one, features, kind):
    """Also where one rank has two pieces of a table."""
    model = model_of(features)
    planned = plan_of(model, ShardingConfig(kinds=(kind,)))
    header, *lines, summary = format_plan(planned, model, {}).splitlines()
    assert header.split() == ["table", "rows", "dim", "kind", "ranks", "size"]
    assert [tuple(line.split()[:5]) for line in lines] == [
        (name, rows, "32", kind, "0")
        for name, rows in (("cat_2", "300"), ("cat_0", "50"), ("cat_3", "24"), ("cat_1", "7"))
    ]
    assert lines[0].endswith("38.4 kB")
    assert summary == "4 tables, 381 rows, 48.8 kB"


def own_model(bag=None, sequence=None, is_weighted=False):
    """Two pooled tables of different dims, and one without pooling, with these changes."""
    meta, wide = torch.device("meta"), {"embedding_dim": 8, "num_embeddings": 40}
    bags = [
        EmbeddingBagConfig(**{"name": "a", "feature_names": ["f", "g"], **wide, **(bag or {})}),
        EmbeddingBagConfig(name="b", feature_names=["h"], embedding_dim=12, num_embeddings=9),
    ]
    items = [EmbeddingConfig(**{"name": "past", "feature_names": ["f"], **wide, **(sequence or {})})]
    return nn.ModuleDict(
        {
            "bags": EmbeddingBagCollection(tables=bags, is_weighted=is_weighted, device=meta),
            "sequences": EmbeddingCollection(tables=items, device=meta),
        }
    )


def test_collections_with_and_without_pooling_are_planned_together(world_of_one):
    model = own_model(is_weighted=True)
    text = format_plan(plan_of(model), model, {})
    assert [line.split()[:3] for line in text.splitlines()[1:4]] == [
        ["a", "40", "8"],
        ["past", "40", "8"],
        ["b", "9", "12"],
    ]


@pytest.mark.parametrize(
    ("change", "device", "message"),
    [
        ({"bag": {"embedding_dim": 6}}, "cpu", "table a has dim 6, .* multiples of 4; the nearest is 8"),
        ({"sequence": {"embedding_dim": 1}}, "cpu", "table past has dim 1, .*the nearest is 4"),
        ({"sequence": {"embedding_dim": 13}}, "cuda", "table past has dim 13, .*the nearest is 12"),
        (
            {"bag": {"embedding_dim": 4096}},
            "cuda",
            "table a has dim 4096, .*at most 2048; the nearest is 2",
        ),
        ({"sequence": {"name": "a"}}, "cpu", "two tables are called a: give each a name of its own"),
        ({"bag": {"data_type": DataType.FP16}}, "cpu", "table a has data type FP16"),
        ({"bag": {"pooling": PoolingType.MEAN}, "is_weighted": True}, "cpu", "table a has pooling mean and"),
    ],
)
def test_tables_that_kernels_get_wrong_are_refused_by_name(change, device, message):
    with pytest.raises(ValueError, match=message):
        check_tables(own_model(**change), torch.device(device))


@pytest.mark.parametrize("dim", [4, 4096])
def test_any_multiple_of_four_is_taken_on_the_cpu(dim):
    check_tables(own_model({"embedding_dim": dim}), CPU)


def test_copies_count_and_many_ranks_are_counted(features):
    model = model_of(features[:2])
    kinds = {"cat_0": ("table_row_wise", range(8)), "cat_1": ("data_parallel", (0, 1))}
    plan = {name: SimpleNamespace(sharding_type=kind, ranks=ranks) for name, (kind, ranks) in kinds.items()}
    text = format_plan(SimpleNamespace(plan={"sparse.tables": plan}), model, {})
    assert [line.split() for line in text.splitlines()[1:]] == [
        ["cat_0", "50", "32", "table_row_wise", "8", "ranks", "6.4", "kB"],
        ["cat_1", "7", "32", "data_parallel", "0,1", "1.79", "kB"],
        ["2", "tables,", "57", "rows,", "8.19", "kB"],
    ]


@pytest.fixture
def two_nodes_of_two(world_of_one, monkeypatch):
    """Four GPUs, as far as a planner asks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(plan, "memory_bytes", lambda _: {"ddr_cap": 10**11, "hbm_cap": 10**10})
    monkeypatch.setattr(plan.dist, "get_world_size", lambda: 4)


@pytest.mark.parametrize(
    ("kind", "pieces"),
    {
        "table_wise": [(10**6, 32)],
        "column_wise": [(10**6, 16)] * 2,
        "row_wise": [(10**6 // 4, 32)] * 4,
        "table_row_wise": [(10**6 // 2, 32)] * 2,
        "table_column_wise": [(10**6, 16)] * 2,
        "grid_shard": [(10**6 // 2, 16)] * 4,
    }.items(),
)
def test_every_kind_that_torchrec_has_can_be_planned_for_cuda(two_nodes_of_two, kind, pieces):
    assert kind in SHARDING_KINDS["cuda"]
    model, cuda = model_of([Feature(name="cat_0", rows=10**6)]), torch.device("cuda")
    sharder = make_sharder(TablesConfig())
    planned = make_plan(model, sharder, ShardingConfig(kinds=(kind,)), cuda, 16)
    (sharding,) = (sharding for module in planned.plan.values() for sharding in module.values())
    assert sharding.sharding_type == kind
    assert [tuple(each.shard_sizes) for each in sharding.sharding_spec.shards] == pieces


@pytest.fixture
def eight_h100(world_of_one, monkeypatch):
    """A node of eight GPUs with 80 GB and an eighth of 2 TB each, as far as a planner asks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(plan, "memory_bytes", lambda _: {"ddr_cap": 250 * 10**9, "hbm_cap": 80 * 10**9})
    monkeypatch.setattr(plan.dist, "get_world_size", lambda group=None: 8)


def placed(rows, **options):
    """Compute kernels of two tables of 128 columns, and the bytes of fp32 weights on each of eight GPUs."""
    cuda = torch.device("cuda")
    model = model_of([Feature(name=f"cat_{number}", rows=rows) for number in range(2)], dim=128)
    config = ShardingConfig(kinds=("row_wise",), **options)
    sharder = make_sharder(TablesConfig(optimizer="rowwise_adagrad"))
    made = make_plan(model, sharder, config, cuda, 8192)
    tables = [sharding for module in made.plan.values() for sharding in module.values()]
    pieces = [piece for table in tables for piece in table.sharding_spec.shards]
    held = dict.fromkeys(range(8), 0)
    for piece in pieces:
        held[piece.placement.rank()] += 4 * piece.shard_sizes[0] * piece.shard_sizes[1]
    return {table.compute_kernel for table in tables}, set(held.values())


def test_tables_beyond_eight_gpus_take_host_memory_where_allowed(eight_h100):
    rows = 10**9  # 1 TB in all
    with pytest.raises(ValueError, match=r"\(1\.02 TB .* over 8 ranks with 80 GB .*or sharding\.kernels$"):
        placed(rows)
    for kernel in ("fused_uvm", "fused_uvm_caching"):
        kernels, held = placed(rows, kernels=("fused", kernel))
        assert kernel in kernels
        assert held == {2 * rows // 8 * 512}


def test_tables_that_fit_stay_in_the_memory_of_gpus(eight_h100):
    every = ("fused", "fused_uvm", "fused_uvm_caching")
    assert placed(10**8, kernels=every)[0] == {"fused"}


def test_the_planner_leaves_the_reserved_share_free(eight_h100):
    rows = 8 * 60 * 10**9 // (2 * 512)  # 60 GB of 80 GB on each GPU
    assert placed(rows, reserved_share=0.15)[1] == {60 * 10**9}
    with pytest.raises(ValueError, match="cannot be laid"):
        placed(rows, reserved_share=0.25)


def test_all_kinds_of_torchrec_are_known():
    assert {*SHARDING_KINDS["cuda"], "data_parallel"} == {kind.value for kind in ShardingType}


def test_tables_that_do_not_fit_give_one_clear_line(world_of_one):
    model = model_of([Feature(name="cat_0", rows=10**12)])
    with pytest.raises(
        ValueError, match=r"\(128 TB .* cannot be laid over 1 rank with .*Use more ranks"
    ) as caught:
        plan_of(model)
    assert len(str(caught.value).splitlines()) == 1
