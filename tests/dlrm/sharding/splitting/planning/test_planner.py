"""From a configuration to a plan, on one rank; tests/system has several."""

import re
import time
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from data.criteo import DENSE_NAMES
from data.dataset import Feature
from dlrm.comm.autotune.online_trial import LEAST_ROUNDS
from dlrm.config.schema import Config, DenseConfig, ModelConfig, ShardingConfig, TablesConfig
from dlrm.models.build import build_model
from dlrm.sharding.plan import make_plan, make_sharder
from dlrm.sharding.splitting.planning import planner, torchrec_plan
from dlrm.sharding.splitting.planning.planner import CALLS, WARM_UP, benchmark
from dlrm.sharding.splitting.planning.saved_choice import CHOICE_NAME, load_choice
from dlrm.sharding.splitting.planning.shapes import PlanSetting, shapes_of
from dlrm.training import build
from tests.dlrm.inputs import fake_inputs

CPU = torch.device("cpu")
FEATURES = tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((300, 700, 500)))


@pytest.fixture
def shapes(world_of_one):
    """Of a model's heads, by path, as if there were several ranks."""

    def work(kind, num_ranks, dim=16, dense="adagrad", ids=None, device=CPU, dtype=torch.float32):
        config = ModelConfig(kind=kind, embedding_dim=dim, bottom_mlp=(8, dim), top_mlp=(8, 1), cross_rank=8)
        model = build_model(config, FEATURES, DENSE_NAMES, dtype)
        sharder = make_sharder(TablesConfig())
        plan = make_plan(model, sharder, ShardingConfig(), CPU, 16)
        setting = PlanSetting(
            num_ranks=num_ranks, ids=ids or {}, dense=DenseConfig(optimizer=dense), device=device
        )
        return {shape.path: shape for shape in shapes_of(model, plan, sharder, setting)}

    return work


@pytest.mark.parametrize(
    ("kind", "heads"),
    [
        ("lr", {"wide"}),
        ("fm", {"wide", "sparse"}),
        ("deepfm", {"wide", "sparse"}),
        ("dlrm", {"sparse"}),
        ("dcnv2", {"sparse"}),
    ],
)
def test_every_model_has_heads_that_can_be_split(kind, heads, shapes):
    found = shapes(kind, num_ranks=2)
    assert set(found) == heads
    assert not any(shape.refusal for shape in found.values())
    assert all(sum(shape.split_bags) >= 3 for shape in found.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kind": "dlrm", "num_ranks": 5}, "16 columns make 4 pieces of 4 .*, too few for 5 ranks"),
        ({"kind": "deepfm", "num_ranks": 2, "dense": "adam"}, "on cpu .* by adam; set dense.optimizer"),
        ({"kind": "dcnv2", "num_ranks": 2, "dense": "adam"}, "on cpu .* by adam; set dense.optimizer"),
        ({"kind": "dlrm", "num_ranks": 1}, "there is one rank"),
    ],
)
def test_heads_that_cannot_be_split_have_a_reason(options, reason, shapes):
    found = shapes(**options)
    assert re.search(reason, found["sparse"].refusal)
    assert options["num_ranks"] == 1 or "wide" not in found or found["wide"].refusal == ""


def test_ids_are_counted_by_feature(shapes):
    shape = shapes("lr", num_ranks=2, ids={"cat_1": 10.0})["wide"]
    assert shape.ids == 12
    assert shape.looked_up == (12, 0)  # the ordinary plan is of one rank
    assert sorted(shape.split_ids) == [2, 10]


def test_embeddings_are_exchanged_in_the_dtype_of_the_arithmetic(shapes):
    found = shapes("fm", num_ranks=2, dtype=torch.bfloat16)
    assert {path: shape.value_bytes for path, shape in found.items()} == {"wide": 4, "sparse": 2}


@pytest.fixture
def sharded(world_of_one, tmp_path):
    """Builds a model on one rank, where nothing can be split."""

    def work(strategy, kind="dlrm", folder=tmp_path):
        config = Config(
            model=ModelConfig(kind=kind, embedding_dim=8, bottom_mlp=(8, 8), top_mlp=(8, 1)),
            sharding=ShardingConfig(strategy=strategy),
        )
        return build.shard(fake_inputs(config, FEATURES), folder=folder)

    return work


def test_an_impossible_split_falls_back_with_a_warning(sharded, caplog):
    model = sharded("des")
    assert set(model.plan.plan) == {"sparse.tables"}
    assert "sparse keeps TorchRec's plan" in caplog.text
    assert "there is one rank" in caplog.text


def test_a_split_beyond_a_ranks_memory_falls_back_with_a_warning(sharded, monkeypatch, caplog):
    monkeypatch.setattr(torchrec_plan, "memory_for_tables", lambda device, reserved_share: 50_000)
    assert set(sharded("des", "deepfm").plan.plan) == {"wide.tables", "sparse.tables"}
    assert re.search("sparse keeps .* because rank 0 would need .* kB of 50 kB for tables", caplog.text)


def test_one_rank_splits_heads_whose_parameters_differ_when_split(sharded, tmp_path):
    """So that one rank can load what several ranks have saved; `auto` by itself does not choose a split."""
    assert set(sharded("des", "deepfm", None).plan.plan) == {"wide.tables", "sparse"}
    assert set(sharded("auto", "deepfm").plan.plan) == {"wide.tables", "sparse.tables"}
    choice = tmp_path / CHOICE_NAME
    choice.write_text(choice.read_text().replace("exchange", "split"))
    assert set(sharded("auto", "deepfm").plan.plan) == {"wide.tables", "sparse"}


def test_the_choice_is_stored_and_reused(sharded, tmp_path, monkeypatch):
    sharded("auto")
    text = (tmp_path / CHOICE_NAME).read_text()
    assert load_choice(tmp_path) == {"sparse": "exchange"}
    monkeypatch.setattr(planner, "measure", lambda device: pytest.fail("measured again"))
    sharded("auto")
    assert (tmp_path / CHOICE_NAME).read_text() == text


def test_a_stored_choice_that_became_impossible_is_replaced_by_the_next_best(shapes, caplog):
    (shape,) = shapes("dlrm", num_ranks=2).values()
    assert planner._feasible(shape, {"sparse": "two_level"}, num_nodes=2) == "two_level"
    assert planner._feasible(shape, {"sparse": "two_level"}, num_nodes=1) == "split"
    assert planner._feasible(shape, {}, num_nodes=1) == "exchange"
    assert "keeps TorchRec's plan" not in caplog.text
    assert planner._feasible(replace(shape, refusal="of this"), {"sparse": "split"}, 1) == "exchange"
    assert "because of this" in caplog.text


@pytest.mark.parametrize(("before", "now"), [("des", "torchrec"), ("torchrec", "des")])
def test_a_strategy_that_does_not_fit_saved_parameters_is_refused(sharded, before, now):
    sharded(before, "deepfm")
    sharded(before, "deepfm")
    with pytest.raises(ValueError, match=r"'exchange'.*'split'|'split'.*'exchange'") as caught:
        sharded(now, "deepfm")
    assert "sharding.strategy" in str(caught.value)


def test_heads_without_weights_fit_any_strategy(sharded):
    for strategy in ("des", "torchrec", "auto"):
        sharded(strategy, "dlrm")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            '{"heads": {"sparse": {"strategy": "spilt"}}}',
            "gives sparse the strategy 'spilt'; known .* two_level",
        ),
        ('{"heads": {"sparse": 1}}', "does not say which strategy"),
        ("{", "does not say which strategy"),
    ],
)
def test_a_damaged_choice_file_is_refused(sharded, tmp_path, content, message):
    (tmp_path / CHOICE_NAME).write_text(content)
    for strategy in ("auto", "torchrec"):
        with pytest.raises(ValueError, match=message):
            sharded(strategy)


def test_alternatives_take_turns_and_the_slower_one_takes_longer(world_of_one):
    order = []

    def alternative(name, seconds):
        def work():
            order.append(name)
            time.sleep(seconds)

        return work

    quick, slow = benchmark([alternative("quick", 0.001), alternative("slow", 0.02)], CPU)
    assert 0.001 <= quick < 0.02 <= slow
    rounds = order[2 * WARM_UP :]
    turns = rounds[:: 1 + CALLS]
    assert turns[:4] == ["quick", "slow", "slow", "quick"]  # who comes first changes
    assert rounds == [name for name in turns for _ in range(1 + CALLS)]
    assert len(turns) == 2 * LEAST_ROUNDS  # it has won all of them


def test_the_first_call_of_a_turn_is_not_timed(world_of_one, monkeypatch):
    monkeypatch.setattr(planner, "LASTS_S", 0.0)
    seconds = cycle([0.02, *[0.001] * CALLS])
    for _ in range(WARM_UP):
        next(seconds)
    calls = []

    def work():
        calls.append(time.sleep(next(seconds) if len(calls) >= WARM_UP else 0.0))

    assert WARM_UP % (1 + CALLS) == 0
    assert benchmark([work], CPU)[0] < 0.02 / (1 + CALLS)


def test_rounds_without_a_clear_winner_continue_until_the_time_limit(world_of_one, monkeypatch):
    monkeypatch.setattr(planner, "LASTS_S", 0.0)
    calls = [0, 0]
    # each wins every other round
    naps = [0.002, 0.004]

    def alternative(number):
        def work():
            calls[number] += 1
            rounds_done = (calls[number] - WARM_UP - 1) // (1 + CALLS)
            time.sleep(naps[(rounds_done + number) % 2])

        return work

    benchmark([alternative(0), alternative(1)], CPU)
    assert calls == [WARM_UP + LEAST_ROUNDS * (1 + CALLS)] * 2
