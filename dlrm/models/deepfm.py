"""DeepFM (Guo et al., arXiv 1703.04247): linear part, factorization machine and deep part."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models.linear import LinearHead
from dlrm.models.mlp import Head, Linear
from dlrm.models.tables import PooledFeatures


class DeepFM(nn.Module):
    """Factorization machine and deep network on the same embeddings.

    Args:
        features: sparse features in canonical order; one table each, and one of the linear part.
        num_dense: number of dense features; they enter the linear and the deep part.
        embedding_dim: columns of each table.
        top_mlp: widths of the deep part; the last is 1.
        dtype: of the arithmetic; parameters are fp32.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        num_dense: int,
        embedding_dim: int,
        top_mlp: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.sparse = PooledFeatures(features, embedding_dim, dtype)
        self.wide = LinearHead(features, prefix="wide_")
        self.wide_dense = Linear(num_dense, 1, relu=False)
        self.deep = Head(num_dense + len(features) * embedding_dim, top_mlp)
        self.dtype = dtype

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        embeddings = self.sparse.in_order(sparse)
        linear = (self.wide(sparse) + self.wide_dense(dense)).squeeze(1)
        deep = self.deep(torch.cat([dense.to(self.dtype), embeddings.flatten(1)], dim=1))
        out: Tensor = linear + factorization_machine(embeddings) + deep
        return out


def factorization_machine(embeddings: Tensor) -> Tensor:
    """Sum of the dot products of all pairs, `[B, F, dim]` to fp32 `[B]`, by the sum-of-squares identity."""
    embeddings = embeddings.to(torch.float32)
    total = embeddings.sum(1)
    return 0.5 * (total.square() - embeddings.square().sum(1)).sum(1)
