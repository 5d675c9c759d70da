"""DLRM (Naumov et al., arXiv 1906.00091): bottom MLP, pairwise dot products, top MLP."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models.interaction import DotHead
from dlrm.models.mlp import MLP, LogitMLP


class DLRM(nn.Module):
    """Deep learning recommendation model: bottom MLP, dot interaction with the embeddings, top MLP."""

    def __init__(
        self,
        features: Sequence[Feature],
        num_dense: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.sparse = DotHead(features, embedding_dim, dtype)
        self.bottom = MLP(num_dense, bottom_mlp)
        self.top = LogitMLP(self.sparse.out_features, top_mlp)
        self.dtype = dtype

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        vector = self.bottom(dense.to(self.dtype))
        logits: Tensor = self.top(self.sparse(sparse, vector))
        return logits
