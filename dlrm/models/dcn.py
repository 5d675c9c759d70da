"""DCN-v2 (Wang et al., arXiv 2008.13535) in MLPerf's shape: bottom MLP, low-rank cross layers, top MLP."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models.mlp import MLP, Head, Linear
from dlrm.models.tables import PooledFeatures


class LowRankCross(nn.Module):
    """Cross layers `x <- x0 * (W (V x) + b) + x`, with `V: width -> rank` and `W: rank -> width`.

    Args:
        width: of the input and output.
        rank: of each layer's weight.
        num_layers: how many.
    """

    def __init__(self, width: int, rank: int, num_layers: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(Linear(width, rank, relu=False, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(Linear(rank, width, relu=False) for _ in range(num_layers))

    def forward(self, x0: Tensor) -> Tensor:
        """`[B, width]` to `[B, width]`."""
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.addcmul(x, x0, up(down(x)))
        return x


class DCNv2(nn.Module):
    """Deep and cross network, stacked: the cross layers run over the dense vector and all embeddings.

    Args:
        features: sparse features in canonical order; one table each.
        num_dense: number of dense features.
        embedding_dim: columns of each table, and last width of the bottom MLP.
        bottom_mlp: widths over the dense features.
        top_mlp: widths over the crossed vector; the last is 1.
        cross_layers: number of cross layers.
        cross_rank: rank of their weights.
        dtype: of the arithmetic; parameters are fp32.
    """

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
        width = (len(features) + 1) * embedding_dim
        self.sparse = PooledFeatures(features, embedding_dim, dtype)
        self.bottom = MLP(num_dense, bottom_mlp)
        self.cross = LowRankCross(width, cross_rank, cross_layers)
        self.top = Head(width, top_mlp)
        self.dtype = dtype

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        pooled = self.sparse.in_order(sparse).flatten(1)
        vector = torch.cat([self.bottom(dense.to(self.dtype)), pooled], dim=1)
        logits: Tensor = self.top(self.cross(vector))
        return logits
