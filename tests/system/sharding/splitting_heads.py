"""Heads of the exactness tests, and names and shapes of their weights when split."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from data.dataset import Feature
from dlrm.models.dcn import CrossHead
from dlrm.models.deepfm import DeepFMHead
from dlrm.models.dlrm import DotHead
from dlrm.models.fm import FMHead, LinearHead
from dlrm.sharding.splitting.head import Head

FEATURES = tuple(Feature(name=f"cat_{i}", rows=rows) for i, rows in enumerate((50, 7, 300, 24, 11, 2)))
DIM = 16
DEEP = (10, 6, 1)
CROSS_LAYERS, CROSS_RANK = 2, 6
FIELDS = [feature.name for feature in FEATURES]
HEADS = ("linear", "fm", "dot", "deepfm", "cross")


def make_head(name: str) -> Head:
    """On the meta device as for its tables."""
    kinds: dict[str, Any] = {
        "linear": lambda: LinearHead(FEATURES),
        "fm": lambda: FMHead(FEATURES, DIM, torch.float32),
        "dot": lambda: DotHead(FEATURES, DIM, torch.float32),
        "deepfm": lambda: DeepFMHead(FEATURES, DIM, DIM, DEEP, torch.float32),
        "cross": lambda: CrossHead(FEATURES, DIM, DEEP, CROSS_LAYERS, CROSS_RANK, torch.float32),
    }
    head: Head = kinds[name]()
    return head


def as_split(kind: type, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Parameters of a model, or a state of each, as they are called and shaped where its head is split.

    Args:
        kind: of the head.
        named: by name where it is whole.
    """
    if kind is DeepFMHead:
        first = named["head.deep.hidden.0.weight"]
        rest = {"head.deep.hidden.0.weight": first[:, :DIM]}
        return {**named, **rest, **_tables("first", "first_", first[:, DIM:].t(), FIELDS)}
    return {**named, **dict(_of_cross(named))} if kind is CrossHead else named


def _of_cross(named: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    fields = ["dense", *FIELDS]
    biases = []
    for layer in range(CROSS_LAYERS):
        for way, weight in (
            ("down", named[f"head.cross.down.{layer}.weight"].t()),
            ("up", named[f"head.cross.up.{layer}.weight"]),
        ):
            path = f"cross_tables.{way}.{layer}"
            yield from _tables(path, f"cross_{way}_{layer}_", weight, fields).items()
        biases.append(named[f"head.cross.up.{layer}.bias"])
    yield from _tables("cross_tables.bias", "cross_bias_", torch.stack(biases, dim=1), fields).items()
    yield from _tables("first", "first_", named["head.top.hidden.0.weight"].t(), fields).items()


def _tables(path: str, prefix: str, weight: Tensor, fields: list[str]) -> dict[str, Tensor]:
    """Operator tables, filled up to a multiple of four columns."""
    rows = pad(weight, (0, -weight.shape[1] % 4)).split(DIM)
    return {
        f"head.{path}.tables.embedding_bags.{prefix}{field}.weight": of_field
        for field, of_field in zip(fields, rows, strict=True)
    }
