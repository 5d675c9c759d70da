"""DCN-v2 (Wang et al., arXiv 2008.13535) in MLPerf's shape: bottom MLP, low-rank cross layers, top MLP."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models.cross import CrossHead
from dlrm.models.mlp import MLP


class DCNv2(nn.Module):
    """Deep and cross network, stacked: cross layers over the dense vector and all embeddings, then an MLP."""

    def __init__(
        self,
        features: Sequence[Feature],
        num_dense: int,
        embedding_dim: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        cross_layers: int,
        cross_rank: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.bottom = MLP(num_dense, bottom_mlp)
        self.sparse = CrossHead(features, embedding_dim, top_mlp, cross_layers, cross_rank, dtype)
        self.dtype = dtype

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        logits: Tensor = self.sparse(sparse, self.bottom(dense.to(self.dtype)))
        return logits
