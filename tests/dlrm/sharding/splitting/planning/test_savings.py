"""Bytes that splitting saves, against sums by hand."""

import pytest
import torch

from data.dataset import Feature
from dlrm.config.schema import ModelConfig
from dlrm.models.build import build_model
from dlrm.sharding.splitting.planning.savings import traffic_of

FEATURES = [Feature(name=f"cat_{i}", rows=1000) for i in range(6)]
RANKS, BATCH, DIM, NUM_DENSE = 3, 10, 12, 5
DENSE = tuple(f"int_{i}" for i in range(NUM_DENSE))
OTHERS = RANKS - 1
UNIQUE = [9.0, 8.0, 7.0, 6.0, 5.0, 4.0]
KEYS = sum(UNIQUE)


def traffic(kind):
    config = ModelConfig(
        kind=kind, embedding_dim=DIM, bottom_mlp=(7, DIM), top_mlp=(8, 1), cross_layers=2, cross_rank=3
    )
    model = build_model(config, FEATURES, DENSE, torch.float32)
    return traffic_of(model, RANKS, BATCH, UNIQUE)


def summed(out):
    """`out` numbers a sample, to their owners and back."""
    return 2 * OTHERS * BATCH * out * 4


def averaged(numbers):
    return 2 * OTHERS / RANKS * numbers * 4


def exchanged(dim):
    return 2 * OTHERS / RANKS * BATCH * 6 * dim * 4


def rows(dim):
    return KEYS * (8 + 2 * 4 * dim) * OTHERS / RANKS


FIRST = 6 * DIM * 8
"""Weights of the first layer over embeddings, 8 hidden units; the rest stays replicated."""
CROSSED = 7 * DIM
"""Columns of what DCN-v2's cross layers work on."""
CROSS = 2 * (CROSSED * 3 + 3 * CROSSED + CROSSED) + CROSSED * 8
"""Weights and biases of two cross layers of rank 3, and weights of the layer after them."""


@pytest.mark.parametrize(
    ("kind", "split", "all_to_all", "pull_and_push"),
    [
        ("lr", summed(1), exchanged(4), rows(1)),
        ("fm", summed(1 + DIM + 1), exchanged(4 + DIM), rows(1) + rows(DIM)),
        (
            "deepfm",
            summed(1 + DIM + 1 + 8),
            exchanged(4 + DIM) + averaged(FIRST),
            rows(1) + rows(DIM) + averaged(FIRST),
        ),
        # the dense vector goes out in columns, and its gradient comes back
        ("dlrm", summed(21) + 2 * OTHERS / RANKS * BATCH * DIM * 4, exchanged(DIM), rows(DIM)),
        # two cross layers are summed on all ranks, both ways; the dense vector's rank sends its gradient
        (
            "dcnv2",
            summed(8) + 2 * 2 * averaged(RANKS * BATCH * 3) + OTHERS * BATCH * DIM * 4,
            exchanged(DIM) + averaged(CROSS),
            rows(DIM) + averaged(CROSS),
        ),
    ],
)
def test_traffic_equals_hand_computed_bytes(kind, split, all_to_all, pull_and_push):
    found = traffic(kind)
    assert found.split == pytest.approx(split)
    assert found.all_to_all == pytest.approx(all_to_all)
    assert found.pull_and_push == pytest.approx(pull_and_push)
