"""Plans by the speed of ranks, and the file that has it."""

import platform

import pytest
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import Perf

from data.criteo import DENSE_NAMES
from data.dataset import Feature
from dlrm.config.schema import ModelConfig, TablesConfig
from dlrm.models.build import build_model
from dlrm.sharding.plan import bytes_per_rank, make_sharder
from dlrm.sharding.worker_speeds import SPEEDS_NAME, SpeedPerfModel, load_speeds, save_speeds

TABLES, ROWS, DIM = 15, 1000, 16
TABLE_BYTES = ROWS * DIM * 4


def tables_per_rank(speeds, kind="table_wise", ddr_cap=2**34):
    """Tables' worth of bytes on each rank; `speeds` None: TorchRec's planner as it is."""
    features = [Feature(name=f"f{number}", rows=ROWS) for number in range(TABLES)]
    model = build_model(
        ModelConfig(embedding_dim=DIM, bottom_mlp=(8, DIM), top_mlp=(8, 1)),
        features,
        DENSE_NAMES,
        torch.float32,
    )
    num_ranks = 2 if speeds is None else len(speeds)
    topology = Topology(
        world_size=num_ranks, local_world_size=num_ranks, compute_device="cpu", ddr_cap=ddr_cap
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        performance_model=None if speeds is None else SpeedPerfModel(topology, speeds),
        batch_size=64,
        constraints={
            f"{feature.name}": ParameterConstraints(sharding_types=[kind], compute_kernels=["fused"])
            for feature in features
        },
    )
    plan = planner.plan(model, [make_sharder(TablesConfig())])
    return [held / TABLE_BYTES for held in bytes_per_rank(plan, num_ranks)]


@pytest.mark.parametrize(
    ("speeds", "tables"),
    [([1, 1], [8, 7]), ([4, 1], [12, 3]), ([100, 400], [3, 12]), ([3, 1, 1], [9, 3, 3]), ([200, 1], [14, 1])],
)
def test_ranks_get_tables_in_proportion_to_their_speed(speeds, tables):
    found = tables_per_rank(speeds)
    assert sorted(found) == sorted(tables)
    assert found.index(max(found)) == speeds.index(max(speeds))


def test_equal_speeds_give_the_plan_of_torchrec():
    assert tables_per_rank([7, 7]) == tables_per_rank(None)


def test_a_fast_rank_gets_no_more_than_its_memory_holds():
    assert tables_per_rank([50, 1], ddr_cap=10**6) == [11, 4]  # with optimizer state and what is reserved


def test_tables_split_by_rows_are_spread_evenly_at_any_speed():
    assert tables_per_rank([4, 1], "row_wise") == [7.5, 7.5]


def test_a_plan_is_rated_by_its_slowest_rank():
    class Shard:
        def __init__(self, rank, work):
            self.rank, self.perf = rank, Perf(work, 0, 0, 0)

    class Option:
        shards = (Shard(0, 6.0), Shard(1, 1.0), Shard(1, 1.0))

    topology = Topology(world_size=2, compute_device="cpu")
    assert SpeedPerfModel(topology, [3, 1]).rate([Option]) == 4.0  # of 6 / 1.5 and 2 / 0.5


def test_speeds_are_found_again_by_place(world_of_one, tmp_path):
    assert load_speeds(None, 0) is None
    assert load_speeds(tmp_path, 0) is None
    save_speeds(tmp_path, [474], 3)
    assert load_speeds(tmp_path, 3) == [474.0]


HERE = platform.node()
DAMAGED, OTHERS = "it is damaged", "it is of other workers than these 1"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", DAMAGED),
        ("{}", DAMAGED),
        ('{"speeds": 3}', DAMAGED),
        ("[]", DAMAGED),
        ('{"speeds": {"a/0": 0}}', "not all of its speeds are positive"),
        ('{"speeds": {"a/0": NaN}}', "not all of its speeds are positive"),
        (f'{{"speeds": {{"{HERE}/3": 1}}}}', OTHERS),
        (f'{{"speeds": {{"{HERE}/0": 3, "{HERE}/1": 1}}}}', OTHERS),
    ],
)
def test_a_file_that_is_no_use_is_named_and_training_goes_on(world_of_one, tmp_path, caplog, text, why):
    (tmp_path / SPEEDS_NAME).write_text(text)
    assert load_speeds(tmp_path, 0) is None
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / SPEEDS_NAME} is not used, and tables are laid out for workers")
    assert message.endswith(why)


def test_a_folder_that_cannot_be_written_is_named(world_of_one, tmp_path):
    with pytest.raises(ValueError, match=r"speeds of workers are not stored: .*absent"):
        save_speeds(tmp_path / "absent", [1.0], 0)
