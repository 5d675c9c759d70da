"""Bytes of tables on each rank, and heads that are not split for lack of memory."""

import pytest
import torch

from data.criteo import DENSE_NAMES
from dlrm.config.schema import ModelConfig, TablesConfig
from dlrm.models.build import build_model
from dlrm.sharding.plan import make_sharder
from dlrm.sharding.splitting.layout import ranks_of_tables, split_plan
from dlrm.sharding.splitting.planning.shapes import (
    heads_of,
    operator_bytes,
    piece_bytes,
    table_bytes,
    too_large,
)

GB = 10**9


@pytest.fixture
def heads(features):
    def work(kind):
        config = ModelConfig(kind=kind, embedding_dim=16, bottom_mlp=(8, 16), top_mlp=(8, 1), cross_rank=8)
        return heads_of(build_model(config, features, DENSE_NAMES, torch.float32))

    return work


def pieces_of(head, split_by, num_ranks):
    sharder = make_sharder(TablesConfig())
    return split_plan(head, split_by, [1.0] * len(head.names), sharder, (num_ranks, num_ranks), "cpu")


@pytest.mark.parametrize(
    ("optimizer", "numbers"), [("sgd", 48), ("rowwise_adagrad", 51), ("adagrad", 96), ("adam", 144)]
)
def test_table_bytes_include_optimizer_state(optimizer, numbers):
    assert piece_bytes(3, 16, optimizer) == 4 * numbers


@pytest.mark.parametrize("split_by", ["tables", "columns", "rows"])
def test_all_ranks_together_hold_each_table_once(heads, features, split_by):
    head = heads("dlrm")["sparse"]
    held = table_bytes(head, pieces_of(head, split_by, 2), 2, "adagrad")
    assert sum(held) == sum(piece_bytes(feature.rows, 16, "adagrad") for feature in features)
    assert min(held) > 0


def test_a_whole_table_is_on_its_rank(heads, features):
    head = heads("deepfm")["sparse"]
    owners = ranks_of_tables(head, [1.0] * len(features), 3)
    expected = [0] * 3
    for owner, feature in zip(owners, features, strict=True):
        expected[owner] += 4 * feature.rows * 16
    assert table_bytes(head, pieces_of(head, "tables", 3), 3, "sgd") == expected


@pytest.mark.parametrize(("kind", "numbers"), [("deepfm", 4 * 16 * 8), ("dcnv2", 5 * 16 * (3 * 17 + 8))])
def test_operator_weights_count_with_their_optimizer_state(heads, kind, numbers):
    """First layer `[fields * 16, 8]`; three cross layers of rank 8 with biases, over one field more."""
    head = heads(kind)["sparse"]
    held = operator_bytes(head, pieces_of(head, "tables", 2), 2, "adagrad")
    assert sum(held) == 2 * 4 * numbers


def test_a_head_that_does_not_fit_keeps_the_ordinary_plan():
    ordinary = {"sparse": [11 * GB] * 3, "wide": [GB] * 3}
    split = {"sparse": [1 * GB, 2 * GB, 30 * GB], "wide": [GB] * 3}
    assert too_large(split, ordinary, 31 * GB) == {}
    assert too_large(split, ordinary, 16 * GB) == {"sparse": "rank 2 would need 31 GB of 16 GB for tables"}


def test_heads_are_refused_one_by_one_until_the_rest_fits():
    ordinary = {"a": [5, 5], "b": [5, 5]}
    assert set(too_large({"a": [2, 8], "b": [0, 10]}, ordinary, 13)) == {"b"}
    assert set(too_large({"a": [2, 8], "b": [0, 10]}, ordinary, 12)) == {"a", "b"}
    # ordinary plans are TorchRec's to check
    assert set(too_large({"a": [2, 8]}, ordinary, 1)) == {"a"}
