"""A model of which rank 1 is slow."""

import os
from time import sleep

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

SAMPLE_S = 1e-3


class SlowOnRank1(nn.Module):
    """Logistic regression that takes rank 1 a millisecond more for a sample."""

    def __init__(self, options, inputs):
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"{feature.name}_table",
                embedding_dim=inputs.embedding_dim,
                num_embeddings=feature.rows,
                feature_names=[feature.name],
            )
            for feature in inputs.features
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.names = [feature.name for feature in inputs.features]
        self.top = nn.Linear(len(inputs.dense) + len(self.names) * inputs.embedding_dim, 1)

    def forward(self, dense, sparse):
        if os.environ.get("RANK") == "1":
            sleep(SAMPLE_S * len(dense))
        pooled = self.tables(sparse)
        vectors = [pooled[name].float() for name in self.names]
        return self.top(torch.cat([dense, *vectors], dim=1)).squeeze(1)
