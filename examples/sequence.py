"""A sequence model as a class of the user: attention over the last items in HSTU's form, next-item retrieval.

`python -m examples.sequence` makes the data; `torchrun ... -m dlrm.train --recipe examples/sequence.toml`
trains. History and next item share one table of an `EmbeddingCollection`, which does not pool. The layer is
that of HSTU (Zhai et al., ICML 2024, arXiv 2402.17152, equations 1 to 3): SiLU instead of softmax, so that
the strength of an interest is not normalized away, a bias by distance, and a gate.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars
import torch
from torch import Tensor, nn
from torch.nn.functional import normalize, silu
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from dlrm.models.contract import ModelInputs
from examples.in_batch import InBatch
from examples.small_data import write_dataset

ITEMS, GROUPS, MOST_ITEMS = 500, 25, 8
DAYS, ROWS_PER_DAY = 4, 20_000
FOLLOWS: Final = 0.8
"""Share of visits to the group of the item before the last: visitors alternate between two interests."""


class HSTULayer(nn.Module):
    """Attention of each item to itself and those before it, with a residual connection."""

    def __init__(self, dim: int, heads: int, most_items: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_out = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.uvqk, self.out = nn.Linear(dim, 4 * dim), nn.Linear(dim, dim)
        self.distance_bias = nn.Parameter(torch.zeros(heads, most_items))
        self.dropout = nn.Dropout(dropout)
        # starts as the mean of the items, which learns at once
        gates, values, *_ = self.uvqk.weight.data.chunk(4)
        nn.init.zeros_(gates)
        nn.init.ones_(self.uvqk.bias.data[:dim])
        nn.init.eye_(values)
        nn.init.eye_(self.out.weight)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Map `[B, L, dim]` to the same; `mask` `[B, L]` is False where there is no item."""
        batch, length, dim = x.shape
        u, v, q, k = silu(self.uvqk(self.norm(x))).chunk(4, dim=-1)
        v, q, k = (each.view(batch, length, self.heads, -1).transpose(1, 2) for each in (v, q, k))
        places = torch.arange(length, device=x.device)
        distance = places.unsqueeze(1) - places
        scores = q @ k.transpose(2, 3) + self.distance_bias[:, distance.clamp(min=0)]
        weights = silu(scores) / length * ((distance >= 0) & mask[:, None, None, :])
        attended = (weights @ v).transpose(1, 2).reshape(batch, length, dim)
        added: Tensor = self.dropout(self.out(self.norm_out(attended) * u))
        return x + added


class SequenceModel(nn.Module):
    """Scores the next item by the last ones; `sequence.toml` lists the options.

    `history` and `target` are features of the same items; a history has at most `most_items`, oldest first.
    """

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__()
        self.history, self.target, self.k = options["history"], options["target"], options["k"]
        self.most_items, dim = options["most_items"], inputs.embedding_dim
        self.tables = EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                EmbeddingConfig(
                    name="item_table",
                    embedding_dim=dim,
                    num_embeddings=max(feature.rows for feature in inputs.features),
                    feature_names=[self.history, self.target],
                )
            ],
        )
        self.layers = nn.ModuleList(
            HSTULayer(dim, options["heads"], self.most_items, options["dropout"])
            for _ in range(options["layers"])
        )
        self.scale = nn.Parameter(torch.tensor(1.0 / options["temperature"]).log())

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> InBatch:
        """Score the items that come next in the batch for each history."""
        vectors = self.tables(sparse)
        lengths = vectors[self.history].lengths().clamp(max=self.most_items)
        x = vectors[self.history].to_padded_dense(self.most_items).float()
        mask = torch.arange(self.most_items, device=x.device) < lengths.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, mask)
        last = x[torch.arange(x.shape[0], device=x.device), lengths.clamp(min=1) - 1]
        target = vectors[self.target].values().float()
        scores = self.scale.exp() * normalize(last) @ normalize(target).t()
        return InBatch(scores, sparse[self.target].values())

    def loss(self, outputs: InBatch, labels: Tensor) -> Tensor:
        """In-batch softmax."""
        return outputs.loss(labels)

    def logits(self, outputs: InBatch) -> None:
        """A score ranks the next items of one history, and says nothing about whether there is a next one."""

    def metrics(self, outputs: InBatch, labels: Tensor) -> dict[str, Tensor]:
        """recall@k among the next items of the batch, and what chance gives."""
        return outputs.recall(labels, self.k)


def make_data(folder: Path) -> None:
    """Write days of visits: histories of 2 to `MOST_ITEMS` items, and the next item."""
    random = np.random.default_rng(0)

    def one_day() -> polars.DataFrame:
        visits = random.integers(ITEMS, size=(ROWS_PER_DAY, MOST_ITEMS + 1))
        for place in range(2, MOST_ITEMS + 1):
            follows = random.random(ROWS_PER_DAY) < FOLLOWS
            group = visits[:, place - 2] % GROUPS  # an item's number modulo GROUPS is its group
            visits[:, place] += np.where(follows, group - visits[:, place] % GROUPS, 0)
        begins = random.integers(MOST_ITEMS - 1, size=ROWS_PER_DAY)
        histories = [row[begin:-1].tolist() for row, begin in zip(visits, begins, strict=True)]
        return polars.DataFrame(
            {
                "label": np.ones(ROWS_PER_DAY, np.int8),
                "history": polars.Series(histories, dtype=polars.List(polars.Int32)),
                "next": visits[:, -1].astype(np.int32),
            }
        )

    write_dataset(folder, [one_day() for _ in range(DAYS)], {"history": ITEMS, "next": ITEMS})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make the data of this example.")
    parser.add_argument("--out", type=Path, default=Path("datasets/sequence"), help="folder to make")
    make_data(parser.parse_args().out)
