"""The models against their formulas, unsharded."""

import copy
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from data.criteo import DENSE_NAMES
from data.dataset import Feature
from dlrm.config.schema import ModelConfig
from dlrm.models.build import build_model
from dlrm.models.dcn import DCNv2
from dlrm.models.deepfm import DeepFM
from dlrm.models.dlrm import DLRM
from dlrm.models.fm import FactorizationMachine, LogisticRegression, pairs_of, sums_of
from dlrm.sharding.plan import tables_of

DIM = 8
KINDS = {
    "dlrm": DLRM,
    "dcnv2": DCNv2,
    "deepfm": DeepFM,
    "fm": FactorizationMachine,
    "lr": LogisticRegression,
}


@pytest.fixture
def make_model(features, materialize):
    all_features = features

    def work(kind, dtype=torch.float32, features=all_features, num_dense=13):
        torch.manual_seed(1)
        config = ModelConfig(
            kind=kind, embedding_dim=DIM, bottom_mlp=(16, DIM), top_mlp=(16, 1), cross_layers=2, cross_rank=5
        )
        return materialize(build_model(config, features, DENSE_NAMES[:num_dense], dtype))

    return work


def bags_of(model, batch, prefix=""):
    """Sum-pooled embeddings by the definition: one sample, one feature, one id after the other."""
    tables = (model.wide if prefix else model.sparse).tables.embedding_bags
    pooled = []
    for name in batch.sparse.keys():  # noqa: SIM118  # no dict
        ids, table = batch.sparse[name], tables[f"{prefix}{name}"].weight
        weights = ids.weights_or_none()
        weights = torch.ones(len(ids.values())) if weights is None else weights
        offsets = ids.offsets().tolist()
        rows = [
            sum((weights[k] * table[ids.values()[k]] for k in range(begin, end)), torch.zeros(table.shape[1]))
            for begin, end in pairwise(offsets)
        ]
        pooled.append(torch.stack(rows))
    return torch.stack(pooled, dim=1)  # [B, F, dim]


def mlp(layers, x):
    for layer in layers:
        x = (x @ layer.weight.t() + layer.bias).relu()
    return x


def head(module, x):
    x = mlp(module.hidden, x)
    return (x @ module.logit.weight.t() + module.logit.bias).squeeze(1)


def dlrm_by_definition(model, batch):
    dense = [mlp(model.bottom, batch.dense)] if batch.dense.shape[1] else []
    vectors = [*dense, *bags_of(model, batch).unbind(1)]
    pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
    return head(model.top, torch.cat([*dense, torch.stack(pairs, 1)], 1))


def dcn_by_definition(model, batch):
    dense = [mlp(model.bottom, batch.dense)] if batch.dense.shape[1] else []
    x0 = x = torch.cat([*dense, bags_of(model, batch).flatten(1)], 1)
    for down, up in zip(model.sparse.cross.down, model.sparse.cross.up, strict=True):
        x = x0 * (x @ down.weight.t() @ up.weight.t() + up.bias) + x
    return head(model.sparse.top, x)


def lr_by_definition(model, batch):
    linear = bags_of(model, batch, "linear_")[:, :, 0].sum(1)
    return linear + batch.dense @ model.wide_dense.weight[0] + model.wide_dense.bias


def fm_by_definition(model, batch):
    pairs = sum((a * b).sum(1) for a, b in combinations(bags_of(model, batch).unbind(1), 2))
    return lr_by_definition(model, batch) + pairs


def deepfm_by_definition(model, batch):
    embeddings = bags_of(model, batch)
    deep = head(model.sparse.deep, torch.cat([batch.dense, embeddings.flatten(1)], 1))
    return fm_by_definition(model, batch) + deep


DEFINITIONS = {
    "dlrm": dlrm_by_definition,
    "dcnv2": dcn_by_definition,
    "deepfm": deepfm_by_definition,
    "fm": fm_by_definition,
    "lr": lr_by_definition,
}


@pytest.mark.parametrize(
    ("num_features", "num_dense", "bags"),
    [(4, 13, "one_hot"), (4, 13, "multi_hot"), (4, 0, "weighted"), (1, 13, "weighted"), (1, 0, "one_hot")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_models_equal_their_definition(kind, num_features, num_dense, bags, features, make_model, make_batch):
    if kind == "dlrm" and num_features + (num_dense > 0) < 2:
        pytest.skip("refused: see the next test")
    weights = "weights" if bags == "weighted" else ""
    shape = {
        "features": [replace(each, weights=weights) for each in features[:num_features]],
        "num_dense": num_dense,
    }
    model = make_model(kind, **shape)
    assert type(model) is KINDS[kind]
    reference = copy.deepcopy(model)
    batch = make_batch(17, seed=3, multi_hot=bags != "one_hot", weighted=bags == "weighted", **shape)
    if bags != "one_hot":
        assert (batch.sparse.lengths() == 0).any()
    logits, expected = model(batch.dense, batch.sparse), DEFINITIONS[kind](reference, batch)
    assert logits.shape == (17,)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    for out in (logits, expected):
        binary_cross_entropy_with_logits(out, batch.labels).backward()
    for (name, found), wanted in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert found.grad is not None, name
        expected_grad = torch.zeros_like(wanted) if wanted.grad is None else wanted.grad  # fm of one feature
        torch.testing.assert_close(found.grad, expected_grad, rtol=1e-3, atol=1e-6, msg=name)


def test_dot_products_of_a_single_vector_are_refused(features, make_model):
    with pytest.raises(ValueError, match=r"needs two vectors.*set model\.kind to dcnv2, deepfm, fm or lr"):
        make_model("dlrm", features=features[:1], num_dense=0)


@pytest.mark.parametrize("kind", KINDS)
def test_mixed_precision_keeps_parameters_and_gradients_in_fp32(kind, make_model, make_batch):
    exact, mixed = make_model(kind), make_model(kind, torch.bfloat16)
    batch = make_batch(64, seed=3, multi_hot=True)
    logits = mixed(batch.dense, batch.sparse)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, exact(batch.dense, batch.sparse), rtol=0.05, atol=0.05)
    binary_cross_entropy_with_logits(logits, batch.labels).backward()
    for name, parameter in mixed.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name


def test_factorization_machine_in_a_hand_made_case():
    embeddings = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])
    assert pairs_of(sums_of(embeddings, 2)).tolist() == [[11 + 17 + 39]]
    assert sums_of(embeddings.to(torch.bfloat16), 2).dtype == torch.float32


def test_features_come_in_canonical_order_whatever_the_input(make_model, make_batch):
    """KeyedJaggedTensors may hold their features in any order; so may sharded output."""
    model, batch = make_model("deepfm"), make_batch(5, seed=1)
    shuffled = batch.sparse.permute([2, 0, 3, 1])
    torch.testing.assert_close(model(batch.dense, shuffled), model(batch.dense, batch.sparse))


def test_features_may_be_named_like_methods_of_modules():
    """Columns of other people's data are called `items`, `type` or `user.id`."""
    features = [Feature(name=name, rows=5) for name in ("items", "type", "user.id", "cat")]
    for kind in KINDS:
        config = ModelConfig(kind=kind, embedding_dim=DIM, bottom_mlp=(16, DIM), top_mlp=(16, 1))
        model = build_model(config, features, ["x"], torch.float32)
        names = [table.name for table in tables_of(model)]
        assert len(set(names)) == len(names)
        assert not any("." in name for name in names)
