"""DLRM (Naumov et al., arXiv 1906.00091): bottom MLP, pairwise dot products, top MLP.

The dot interaction is one autograd function, because the plain form is the slowest part of a CPU step: fancy
indexing of the triangle is slow forward and worse backward. Here one gather reads the triangle, and one
gather reads the symmetric gradient, so that a single batched product gives the gradient of all embeddings.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.config.schema import ModelConfig
from dlrm.models.mlp import MLP, LogitMLP
from dlrm.sharding.splitting.costs import Crossing, SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned, SplitBy


def _as_bits(x: Tensor) -> Tensor:
    """View bfloat16 as int16, because PyTorch's gather converts bfloat16 to fp32 and back."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


class _Products(torch.autograd.Function):
    """The first `kept` columns of the dense vector, followed by the pairs' products."""

    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, pooled: Tensor, pairs: Tensor, symmetric: Tensor, kept: int
    ) -> Tensor:
        batch, dim = dense.shape
        vectors = torch.cat([dense, pooled], dim=1).view(batch, symmetric.shape[0], dim)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        ctx.save_for_backward(vectors, symmetric)
        ctx.kept = kept
        out = dense.new_empty(batch, kept + pairs.numel())
        out[:, :kept] = dense[:, :kept]
        torch.gather(_as_bits(products), 1, pairs.expand(batch, -1), out=_as_bits(out)[:, kept:])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        vectors, symmetric = ctx.saved_tensors
        batch, num_vectors, _ = vectors.shape
        grad_products = _as_bits(grad).gather(1, symmetric.view(1, -1).expand(batch, -1)).view(grad.dtype)
        grad_products[:, :: num_vectors + 1] = 0  # the diagonal: no vector is paired with itself
        grad_vectors = torch.bmm(grad_products.view(batch, num_vectors, num_vectors), vectors)
        grad_dense = grad_vectors[:, 0]
        if ctx.kept:
            grad_dense = grad_dense + grad[:, : ctx.kept]
        # one product and copies of its parts are faster than two products
        return grad_dense, grad_vectors[:, 1:].flatten(1), None, None, None


class PairwiseDots(nn.Module):
    """The dot products of all pairs of vectors, after the first `kept` numbers of the dense vector.

    The output is `[B, kept + (F + 1) * F / 2]`: pairs are listed by canonical feature, the dense vector
    first, lower triangle row by row, in whatever order the pooled input comes. Sharding delivers features in
    its own order, and undoing that in the gather's index costs nothing.
    """

    pairs: Tensor
    symmetric: Tensor

    def __init__(self, names: Sequence[str], kept: int = 0) -> None:
        super().__init__()
        self.names = list(names)
        self.kept = kept
        num_vectors = len(self.names) + 1
        self.out_features = kept + num_vectors * (num_vectors - 1) // 2
        self.register_buffer("pairs", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("symmetric", torch.empty(0, dtype=torch.int64), persistent=False)
        self._indexed_order: list[str] = []

    def _index(self, names: Sequence[str], device: torch.device) -> None:
        position = {name: 1 + place for place, name in enumerate(names)}
        places = torch.tensor([0, *(position[name] for name in self.names)])
        num_vectors = places.numel()
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        first, second = places[row], places[column]
        slots = self.kept + torch.arange(row.numel())
        symmetric = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        symmetric[first, second] = slots
        symmetric[second, first] = slots
        self.pairs = (first * num_vectors + second).view(1, -1).to(device)
        self.symmetric = symmetric.to(device)
        self._indexed_order = list(names)

    def forward(self, dense: Tensor, pooled: Tensor, names: Sequence[str]) -> Tensor:
        """Multiply `dense` `[B, dim]` and `pooled` `[B, F * dim]` with the columns of features `names`."""
        if list(names) != self._indexed_order:
            self._index(names, pooled.device)
        apply = cast("Callable[..., Tensor]", _Products.apply)
        return apply(dense, pooled, self.pairs, self.symmetric, self.kept)


class DotInteraction(PairwiseDots):
    """The dense vector, then the dot products of all pairs of vectors (DLRM, arXiv 1906.00091, 2.1.3)."""

    def __init__(self, names: Sequence[str], embedding_dim: int) -> None:
        super().__init__(names, kept=embedding_dim)


class DotHead(Head):
    """The tables of DLRM and their dot interaction with the dense vector.

    Split by columns, each rank holds some dimensions of every table and computes all pairs' products over
    these; summing the partial products sends as many numbers for any dimension (derived from DES).
    """

    split_by: ClassVar[SplitBy] = "columns"

    def __init__(self, features: Sequence[Feature], dim: int, dtype: torch.dtype) -> None:
        super().__init__(features, dim, dtype)
        self.interaction = DotInteraction(self.names, dim)
        self.products = PairwiseDots(self.names)
        self.out_features = self.interaction.out_features
        self._dim = dim

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute `[B, out_features]` from the features and the dense vector `[B, dim]`."""
        (vector,) = dense
        interacted: Tensor = self.interaction(vector, *self.pooled(sparse))
        return interacted

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the interaction as `forward` does."""
        (vector,) = dense
        columns = exchange.deal_columns(vector, owned.columns, owned.batch_sizes)
        # a rank without columns has no names, and its products are 0 in any order
        partial = self.products(columns, owned.values, owned.names or self.names)
        return torch.cat([vector, exchange.sum_to_owners(partial, owned.batch_sizes)], dim=1)

    def traffic(self) -> SplitTraffic:
        """The columns of the dense vector and the products, in the dtype of the head."""
        return SplitTraffic(
            crossings=(
                Crossing(way="deal_columns", width=self._dim, value_bytes=self.dtype.itemsize),
                Crossing(
                    way="sum_to_owners",
                    width=self.products.out_features,
                    value_bytes=self.dtype.itemsize,
                ),
            )
        )


class DLRM(nn.Module):
    """Deep learning recommendation model: bottom MLP, dot interaction with the embeddings, top MLP."""

    def __init__(
        self, config: ModelConfig, features: Sequence[Feature], num_dense: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.sparse = DotHead(features, config.embedding_dim, dtype)
        self.bottom = MLP(num_dense, config.bottom_mlp)
        self.top = LogitMLP(self.sparse.out_features, config.top_mlp)
        self.dtype = dtype

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        vector = self.bottom(dense.to(self.dtype))
        logits: Tensor = self.top(self.sparse(sparse, vector))
        return logits
