"""The smallest model of one's own: pooled tables and an MLP; `dlrm/models/README.md` explains it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from dlrm.models.contract import ModelInputs


class Minimal(nn.Module):
    """An MLP over the dense features and all pooled embeddings."""

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__()
        dim = inputs.embedding_dim
        tables = [
            EmbeddingBagConfig(
                name=f"{feature.name}_table",
                embedding_dim=dim,
                num_embeddings=feature.rows,
                feature_names=[feature.name],
            )
            for feature in inputs.features
        ]
        self.tables = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.names = [feature.name for feature in inputs.features]
        width, hidden = len(inputs.dense) + len(self.names) * dim, options["hidden"]
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, 1))

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]`."""
        pooled = self.tables(sparse)
        vectors = [pooled[name].float() for name in self.names]
        logits: Tensor = self.mlp(torch.cat([dense, *vectors], dim=1)).squeeze(1)
        return logits
