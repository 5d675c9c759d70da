"""A two-tower retrieval model as a class of the user: in-batch softmax, recall@k.

`python -m examples.two_tower` makes the data; `torchrun ... -m dlrm.train --recipe examples/two_tower.toml`
trains. The user's tower and the item's end in vectors whose dot product is the score (Yi et al., RecSys 2019,
with their correction for popular items if `log_q` names a dense column with the log of an item's share).
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor

from dlrm.models.contract import ModelInputs
from examples.in_batch import InBatch
from examples.small_data import write_dataset

USERS, ITEMS, GROUPS, COUNTRIES = 3000, 1000, 25, 20
DAYS, ROWS_PER_DAY = 4, 20_000
FOLLOWS: Final = 0.8
"""Share of clicks on an item of the user's own group."""


class Tower(nn.Module):
    """Maps the embeddings of some features to a vector of length 1."""

    def __init__(self, features: list[str], dim: int, width: int) -> None:
        super().__init__()
        self.features = features
        self.layers = nn.Sequential(nn.Linear(len(features) * dim, width), nn.ReLU(), nn.Linear(width, dim))

    def forward(self, pooled: KeyedTensor) -> Tensor:
        """Map to `[B, dim]`, fp32."""
        return normalize(self.layers(torch.cat([pooled[name].float() for name in self.features], dim=1)))


class TwoTower(nn.Module):
    """Scores items for users; `two_tower.toml` lists the options.

    `user` and `item` are the features of the towers, the item's id first. `log_q` is a dense column or "".
    """

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__()
        self.k, self.item = options["k"], options["item"][0]
        self.log_q = list(inputs.dense).index(options["log_q"]) if options["log_q"] else None
        self.tables = EmbeddingBagCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingBagConfig(
                    name=f"{feature.name}_table",
                    embedding_dim=inputs.embedding_dim,
                    num_embeddings=feature.rows,
                    feature_names=[feature.name],
                )
                for feature in inputs.features
            ],
        )
        self.users = Tower(options["user"], inputs.embedding_dim, options["width"])
        self.items = Tower(options["item"], inputs.embedding_dim, options["width"])
        self.scale = nn.Parameter(torch.tensor(1.0 / options["temperature"]).log())

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> InBatch:
        """Score all pairs of a user and an item of the batch."""
        pooled = self.tables(sparse)
        scores = self.scale.exp() * self.users(pooled) @ self.items(pooled).t()
        if self.log_q is not None and self.training:
            scores = scores - dense[:, self.log_q]
        return InBatch(scores, sparse[self.item].values())

    def loss(self, outputs: InBatch, labels: Tensor) -> Tensor:
        """In-batch softmax over the clicked samples."""
        return outputs.loss(labels)

    def logits(self, outputs: InBatch) -> None:
        """A score ranks items for one user, and says nothing about whether there is a click."""

    def metrics(self, outputs: InBatch, labels: Tensor) -> dict[str, Tensor]:
        """recall@k among the items of the batch, and what chance gives."""
        return outputs.recall(labels, self.k)


def make_data(folder: Path) -> None:
    """Write days of clicks by users, most of them on items of their own group, popular ones more often."""
    random = np.random.default_rng(0)
    group_of_user, country = random.integers(GROUPS, size=USERS), random.integers(COUNTRIES, size=USERS)
    group_of_item = np.arange(ITEMS) % GROUPS
    popularity = 1.0 / (1.0 + np.arange(ITEMS) // GROUPS) ** 0.7
    share = popularity / popularity.sum()
    of_group = [np.flatnonzero(group_of_item == group) for group in range(GROUPS)]

    def one_day() -> polars.DataFrame:
        user = random.integers(USERS, size=ROWS_PER_DAY)
        clicked = random.random(ROWS_PER_DAY) < 0.5
        item = random.choice(ITEMS, size=ROWS_PER_DAY, p=share)
        for row in np.flatnonzero(clicked & (random.random(ROWS_PER_DAY) < FOLLOWS)):
            mine = of_group[group_of_user[user[row]]]
            item[row] = random.choice(mine, p=share[mine] / share[mine].sum())
        return polars.DataFrame(
            {
                "label": clicked.astype(np.int8),
                "item_log_share": np.log(share[item]).astype(np.float32),
                "user": user.astype(np.int32),
                "country": country[user].astype(np.int32),
                "item": item.astype(np.int32),
            }
        )

    rows = {"user": USERS, "country": COUNTRIES, "item": ITEMS}
    write_dataset(folder, [one_day() for _ in range(DAYS)], rows, dense=["item_log_share"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the data of this example.")
    parser.add_argument("--out", type=Path, default=Path("datasets/two_tower"), help="folder to make")
    make_data(parser.parse_args().out)
