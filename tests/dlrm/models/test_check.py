"""Classes of the user that do not keep the contract are refused before training, and say what to change."""

import sys

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from data.criteo import DENSE_NAMES
from data.dataset import Feature
from dlrm.config.schema import ModelConfig
from dlrm.models import check
from tests.dlrm.models.own import Concatenated, TwoTables, tables_for


@pytest.fixture
def check_model(features, make_batch, monkeypatch):
    """Checks a class on a batch of the four features, or of other `features`."""

    def work(cls, features=features, dtype=torch.float32, multi_hot=False, **options):
        monkeypatch.setitem(globals(), cls.__name__, cls)
        config = ModelConfig(kind=f"{__name__}:{cls.__name__}", options=options)
        check.check_model(config, features, DENSE_NAMES, dtype, make_batch(6, 0, multi_hot))

    return work


@pytest.mark.parametrize("multi_hot", [False, True])
@pytest.mark.parametrize("cls", [Concatenated, TwoTables])
def test_right_classes_pass_without_a_trace(cls, multi_hot, check_model):
    before = torch.get_rng_state()
    check_model(cls, multi_hot=multi_hot)
    assert torch.equal(torch.get_rng_state(), before)


class Bare(Concatenated):
    """Gives whatever `give` makes of vectors, and has no other methods."""

    def forward(self, dense, sparse):
        return self.give(self.mlp(self.vectors(dense, sparse)))


class TwoColumns(Bare):
    give = staticmethod(lambda x: x)


class HalfLogits(Bare):
    give = staticmethod(lambda x: x.squeeze(1).bfloat16())


class Pair(Bare):
    give = staticmethod(lambda x: (x, x.squeeze(1)))


class WithoutLogits(Pair):
    def loss(self, outputs, labels):
        return outputs[0].mean()


class WithLoss(Bare):
    """`give` makes a loss of the logits."""

    def forward(self, dense, sparse):
        return Concatenated.forward(self, dense, sparse)

    def loss(self, outputs, labels):
        return self.give(outputs)


class LossPerSample(WithLoss):
    give = staticmethod(lambda x: x)


class DetachedLoss(WithLoss):
    give = staticmethod(lambda x: x.detach().mean())


class NoTensor(WithLoss):
    give = staticmethod(lambda x: x.mean().item())


class RaisingLoss(WithLoss):
    def loss(self, outputs, labels):
        return outputs.view(5, 7)


class Exiting(Concatenated):
    def forward(self, dense, sparse):
        sys.exit(0)


class WideLogits(Concatenated):
    def logits(self, outputs):
        return outputs[:, None]


class MeanMetric(Concatenated):
    def metrics(self, outputs, labels):
        return {"recall": outputs.mean()}


class ListOfMetrics(Concatenated):
    def metrics(self, outputs, labels):
        return [outputs]


class Unused(Concatenated):
    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        self.forgotten = nn.Linear(2, 2)


class UnusedTable(Concatenated):
    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        config = EmbeddingBagConfig(
            name="more", embedding_dim=8, num_embeddings=1000, feature_names=[self.names[0]]
        )
        self.others = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))


class TakenName(Concatenated):
    def metrics(self, outputs, labels):
        return {"auc": outputs}


class Weighted(Concatenated):
    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        configs = self.tables.embedding_bag_configs()
        self.tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"), is_weighted=True)


class InMemory(Concatenated):
    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        self.tables = tables_for(inputs.features, 8, device="cpu")


class WithoutTables(nn.Module):
    def __init__(self, options, inputs):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, dense, sparse):
        return dense.sum(1) + self.bias


class OnlyTables(Concatenated):
    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        del self.mlp

    def forward(self, dense, sparse):
        return self.tables(sparse)[self.names[0]].sum(1)


class FewRows(Concatenated):
    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        self.tables = tables_for([Feature(name=each.name, rows=30) for each in inputs.features], 8)


class OtherFeature(Concatenated):
    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        config = EmbeddingBagConfig(name="user", embedding_dim=8, num_embeddings=9, feature_names=["user"])
        self.tables = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))


class OddDim(Concatenated):
    def __init__(self, options, inputs):
        super().__init__({"dim": 6}, inputs)


class ByPosition(Concatenated):
    def vectors(self, dense, sparse):
        return torch.cat([dense, self.tables(sparse).values()], dim=1)


class HalfInput(Concatenated):
    def vectors(self, dense, sparse):
        return super().vectors(dense, sparse).bfloat16()


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (TwoColumns, r"forward gives float32 \[6, 1\], and the class has no loss and no logits: give fp32"),
        (HalfLogits, r"forward gives bfloat16 \[6\], .*: give fp32 logits \[6\], one for each sample"),
        (Pair, r"forward gives tuple of float32 \[6, 1\], float32 \[6\], and the class has no loss and no"),
        (WithoutLogits, r"and the class has no logits: .* add loss\(outputs, labels\) and logits\(outputs\)"),
        (LossPerSample, r"loss gives float32 \[6\]: give the mean over the samples, a scalar"),
        (NoTensor, "loss gives a float: give the mean over the samples, a scalar"),
        (DetachedLoss, "loss depends on no parameter: .* without detach"),
        (RaisingLoss, r"loss raised RuntimeError: shape '\[5, 7\]' is invalid .*test_check\.py, line \d+\)"),
        (Exiting, r"forward raised SystemExit: 0 \(.*test_check\.py, line \d+\)"),
        (WideLogits, r"logits gives float32 \[6, 1\]: give one for each sample, \[6\], or None"),
        (MeanMetric, r"metrics gives float32 \[\] as recall: give a float for each sample, \[6\]; NaN where"),
        (ListOfMetrics, r"metrics gives list of float32 \[6\]: give a dict"),
        (Unused, r"does not depend on forgotten\.weight, forgotten\.bias: .* requires_grad_\(False\)"),
        (
            UnusedTable,
            r"does not depend on others\.embedding_bags\.more\.weight: use it in forward, remove it",
        ),
        (TakenName, "metrics names one auc, as evaluations do theirs: give it another name"),
        (
            Weighted,
            r"is_weighted=True, and the data has no weights: make it is_weighted=any\(feature\.weights",
        ),
        (InMemory, r"makes its tables in memory: give the collection device=torch\.device\('meta'\)"),
        (WithoutTables, "has no tables: make a TorchRec EmbeddingBagCollection or EmbeddingCollection"),
        (OnlyTables, "has no trained parameter outside its tables: add one, such as a bias"),
        (FewRows, "table of_cat_0 has 30 rows, and feature cat_0 has ids up to 49: take feature.rows"),
        (OtherFeature, r"forward raised KeyError: .*; the data has no feature user, but cat_0, cat_1, cat_2"),
        (OddDim, "table of_cat_0 has dim 6, and FBGEMM's kernels take multiples of 4; the nearest is 8"),
        (ByPosition, r"reads pooled features by their position, .* by name, pooled\[feature\]"),
        (HalfInput, r"forward raised RuntimeError: .*dtype.* \(.*own\.py, line \d+\)"),
    ],
)
def test_wrong_classes_are_refused(cls, message, check_model):
    with pytest.raises(ValueError, match=message) as caught:
        check_model(cls)
    assert "\n" not in str(caught.value)


class Partial(Concatenated):
    """Ignores the last feature, and has a parameter that is not trained."""

    def __init__(self, options, inputs):
        super().__init__(options, inputs)
        self.names = self.names[:-1]
        self.tables = tables_for(inputs.features[:-1], 8)
        self.mlp[0] = nn.Linear(self.mlp[0].in_features - 8, 16)
        self.fixed = nn.Parameter(torch.ones(1), requires_grad=False)


def test_features_without_a_table_are_a_warning(check_model, caplog):
    check_model(Partial)
    assert "has no table for cat_3: it learns nothing from that" in caplog.text
