"""The sharded model trains exactly like plain PyTorch in one process."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from dlrm.config.schema import DenseConfig, ModelConfig, ScheduleConfig, TablesConfig
from dlrm.optim.build import Optimizers

NUM_STEPS = 20
BATCH = 32
RATE = 0.1
KINDS = {"cat_0": "data_parallel", "cat_1": "table_wise", "cat_2": "column_wise", "cat_3": "table_wise"}


class PlainDLRM(torch.nn.Module):
    """DLRM as a textbook has it."""

    def __init__(self, model, tables):
        super().__init__()
        self.bags = torch.nn.ModuleDict(
            {
                name: torch.nn.EmbeddingBag.from_pretrained(weights.clone(), freeze=False, mode="sum")
                for name, weights in tables.items()
            }
        )
        self.bottom = torch.nn.ModuleList(map(self._copy, model.bottom))
        self.top = torch.nn.ModuleList(map(self._copy, [*model.top.hidden, model.top.logit]))

    @staticmethod
    def _copy(layer):
        copy = torch.nn.Linear(layer.in_features, layer.out_features)
        copy.load_state_dict({name: value.clone() for name, value in layer.state_dict().items()})
        return copy

    def forward(self, dense, sparse):
        for layer in self.bottom:
            dense = layer(dense).relu()
        vectors = [dense]
        for name in sorted(self.bags):
            ids = sparse[name]
            vectors.append(self.bags[name](ids.values(), ids.offsets()[:-1], ids.weights_or_none()))
        pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
        x = torch.cat([dense, torch.stack(pairs, 1)], 1)
        for layer in self.top[:-1]:
            x = layer(x).relu()
        return self.top[-1](x).squeeze(1)


@pytest.mark.parametrize("bags", ["one_hot", "multi_hot", "weighted"])
def test_twenty_steps_equal_plain_pytorch(bags, features, shard_model, whole_tables, make_batch):
    config = TablesConfig(optimizer="sgd", learning_rate=RATE)
    weighted = bags == "weighted"
    model = shard_model(
        KINDS,
        ModelConfig(embedding_dim=8, bottom_mlp=(16, 8), top_mlp=(16, 1)),
        config,
        batch_size=BATCH,
        features=[replace(each, weights="weights" * weighted) for each in features],
    )
    optimizers = Optimizers(model, DenseConfig(optimizer="sgd", learning_rate=RATE), config, ScheduleConfig())
    plain = PlainDLRM(model.module, whole_tables(model))
    sgd = torch.optim.SGD(plain.parameters(), lr=RATE)
    first = [parameter.detach().clone() for parameter in plain.parameters()]
    for step in range(NUM_STEPS):
        batch = make_batch(BATCH, seed=step, multi_hot=bags != "one_hot", weighted=weighted)
        optimizers.begin_step(step)
        logits = model(batch.dense, batch.sparse)
        binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizers.step()
        sgd.zero_grad()
        expected = plain(batch.dense, batch.sparse)
        binary_cross_entropy_with_logits(expected, batch.labels).backward()
        sgd.step()
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-6)
    for name, table in whole_tables(model).items():
        torch.testing.assert_close(table, plain.bags[name].weight.data, rtol=0, atol=1e-6, msg=name)
    layers = [*model.module.bottom, *model.module.top.hidden, model.module.top.logit]
    for ours, theirs in zip(layers, [*plain.bottom, *plain.top], strict=True):
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=0, atol=1e-6)
        torch.testing.assert_close(ours.bias, theirs.bias, rtol=0, atol=1e-6)
    moves = [(now - then).abs().max() for now, then in zip(plain.parameters(), first, strict=True)]
    assert min(moves) > 1e-4  # else equality would say little
