"""The proxy model on which `auto` times strategies: the run's layers with smaller tables."""

import pytest
import torch

from data.dataset import Feature
from dlrm.config.schema import Config, ModelConfig, ShardingConfig
from dlrm.sharding.splitting.planning import planner
from dlrm.sharding.splitting.planning.saved_choice import load_choice
from dlrm.training import build, proxy_model
from dlrm.training.build import settle_strategies
from dlrm.training.proxy_model import MOST_ROWS, ProxyModel
from tests.dlrm.inputs import fake_inputs

FEATURES = (Feature(name="small", rows=300), Feature(name="large", rows=100 * MOST_ROWS))
HEADS = {"wide": "exchange", "sparse": "exchange"}


@pytest.fixture
def inputs(world_of_one):
    config = Config(
        model=ModelConfig(kind="deepfm", embedding_dim=8, top_mlp=(8, 1)),
        sharding=ShardingConfig(strategy="auto"),
    )
    return fake_inputs(config, FEATURES, ids={"small": 2.5})


def test_proxy_steps_train_smaller_tables(inputs, monkeypatch):
    made = []
    apply_plan = proxy_model.apply_plan
    monkeypatch.setattr(
        proxy_model, "apply_plan", lambda *args, **more: made.append(apply_plan(*args, **more)) or made[0]
    )
    step = ProxyModel(inputs)(HEADS)
    (model,) = made
    tables = {name: each for name, each in model.state_dict().items() if "embedding_bags" in name}
    rows = {
        each.local_tensor().shape[0] if hasattr(each, "local_tensor") else each.shape[0]
        for each in tables.values()
    }
    assert rows == {300, MOST_ROWS}
    before = [parameter.detach().clone() for parameter in proxy_model.dense_parameters(model)]
    step()
    after = proxy_model.dense_parameters(model)
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_proxy_batches_have_as_many_ids_as_the_data(inputs):
    batch = ProxyModel(inputs)._batch(list(FEATURES))
    lengths = batch.sparse.lengths().view(len(FEATURES), -1)
    assert set(lengths[1].tolist()) == {1}
    assert set(lengths[0].tolist()) == {2, 3}
    assert int(batch.sparse["small"].values().max()) < 300


def test_the_fastest_trial_is_kept_whatever_was_estimated(inputs, tmp_path, monkeypatch):
    """Two ways that are possible, of which the other one turns out to be faster."""
    monkeypatch.setattr(build, "_has_no_choice", lambda *_: False)
    tried = []
    other = {"wide": "exchange", "sparse": "split"}
    monkeypatch.setattr(planner, "candidates", lambda choices: [HEADS, other])
    monkeypatch.setattr(planner, "benchmark", lambda steps, device: [1.0, 0.5][: len(steps)])
    monkeypatch.setattr(planner, "_split_on_one_rank", lambda shape, head: planner.replace(shape, refusal=""))
    monkeypatch.setattr(ProxyModel, "__call__", lambda self, strategies: tried.append(strategies))
    settle_strategies(inputs, tmp_path)
    assert tried == [HEADS, other]
    assert load_choice(tmp_path) == other
    text = (tmp_path / "sharding.json").read_text()
    assert "500.0 ms, and 1000.0 ms with wide exchange and sparse exchange" in text
    settle_strategies(inputs, tmp_path)
    assert len(tried) == 2  # the choice was there


@pytest.mark.system
def test_trials_do_not_change_random_numbers(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "_has_no_choice", lambda *_: False)
    monkeypatch.setattr(planner, "candidates", lambda choices: [HEADS, HEADS])
    settle_strategies(inputs, tmp_path)
    drawn = torch.rand(3)
    proxy_model.unsharded(inputs)  # which sets the seed
    assert torch.equal(drawn, torch.rand(3))
