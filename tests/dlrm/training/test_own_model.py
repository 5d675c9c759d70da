"""Models of the user train like plain PyTorch in the trainer's parts, and are evaluated by their metrics."""

import pytest
import torch

from data.criteo import DENSE_NAMES
from dlrm.config.schema import Config, DenseConfig, ModelConfig, ScheduleConfig, TablesConfig, TrainConfig
from dlrm.models.build import build_model
from dlrm.models.contract import objective_of
from dlrm.optim.build import Optimizers
from dlrm.sharding.parameters import dense_parameters
from dlrm.training.build import shard
from dlrm.training.evaluation import evaluate
from tests.dlrm.inputs import fake_inputs

CPU = torch.device("cpu")
KINDS = ("tests.dlrm.models.own:Concatenated", "tests.dlrm.models.own:TwoTables", "examples.minimal:Minimal")
NUM_STEPS, BATCH, RATE = 10, 32, 0.1


def plain(config, features, tables):
    """The unsharded class on the CPU, its tables as plain `nn.EmbeddingBag`."""
    torch.manual_seed(config.train.seed)
    model = build_model(config.model, features, DENSE_NAMES, torch.float32)
    for name, bag in model.tables.embedding_bags.items():
        bag.weight = torch.nn.Parameter(tables[name].clone())
    return model


@pytest.mark.parametrize("weighted", [False, True])  # none of the classes reads weights
@pytest.mark.parametrize("kind", KINDS)
def test_ten_steps_equal_plain_pytorch(kind, weighted, world_of_one, features, make_batch, whole_tables):
    config = Config(
        model=ModelConfig(kind=kind, options={"hidden": 8} if "Minimal" in kind else {}),
        tables=TablesConfig(optimizer="sgd", learning_rate=RATE),
        train=TrainConfig(precision="fp32"),
    )
    model = shard(fake_inputs(config, features, BATCH))
    reference = plain(config, features, whole_tables(model))
    dense = DenseConfig(optimizer="sgd", learning_rate=RATE)
    optimizers = Optimizers(model, dense, config.tables, ScheduleConfig())
    sgd = torch.optim.SGD(reference.parameters(), lr=RATE)
    ours, theirs = objective_of(model), objective_of(reference)
    for step in range(NUM_STEPS):
        batch = make_batch(BATCH, seed=step, multi_hot=True, weighted=weighted)
        optimizers.begin_step(step)
        loss = ours.loss(model(batch.dense, batch.sparse), batch.labels)
        loss.backward()
        optimizers.step()
        sgd.zero_grad()
        expected = theirs.loss(reference(batch.dense, batch.sparse), batch.labels)
        expected.backward()
        sgd.step()
        torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-6)
    for name, table in whole_tables(model).items():
        torch.testing.assert_close(
            table, reference.tables.embedding_bags[name].weight.data, rtol=0, atol=1e-6, msg=name
        )
    for one, other in zip(dense_parameters(model), dense_parameters(reference), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_evaluation_averages_own_metrics_without_padding(world_of_one, features, make_batch):
    config = Config(model=ModelConfig(kind=KINDS[1]), train=TrainConfig(precision="fp32"))
    model = shard(fake_inputs(config, features, BATCH))
    full, padded = make_batch(BATCH, seed=1), make_batch(BATCH, seed=2)
    padded.num_valid = 5
    values = evaluate(model, [full, padded], CPU)
    assert (values.num_samples, values.auc, values.is_of_clicks) == (BATCH + 5, None, False)
    labels = torch.cat([full.labels, padded.labels[:5]])
    with torch.no_grad():
        outputs = [model(each.dense, each.sparse) for each in (full, padded)]
        scores = torch.cat([model.module.score(each) for each in outputs])[: BATCH + 5]
    assert values.means["labels"].value == pytest.approx(labels.mean().item())
    assert values.means["squared_error"].value == pytest.approx((scores - labels).square().mean().item())
