"""DLRM (Naumov et al., arXiv 1906.00091): bottom MLP, pairwise dot products, top MLP.

The dot interaction is one autograd function, because the plain form is the slowest part of a CPU step: fancy
indexing of the triangle is slow forward and worse backward. Here one gather reads the triangle, and one
gather reads the symmetric gradient, so that a single batched product gives the gradient of all embeddings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models.contract import ModelInputs
from dlrm.models.mlp import MLP, LogitMLP
from dlrm.sharding.splitting.costs import Crossing, SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned, SplitBy


def _as_bits(x: Tensor) -> Tensor:
    """View bfloat16 as int16, because PyTorch's gather converts bfloat16 to fp32 and back."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


class _Products(torch.autograd.Function):
    """The first `kept` columns of the dense vector, followed by the pairs' products.

    Without a dense vector, `dense` is `[B, 0]`.
    """

    @staticmethod
    def forward(
        ctx: Any, dense: Tensor, pooled: Tensor, pairs: Tensor, symmetric: Tensor, kept: int
    ) -> Tensor:
        batch, num_vectors = dense.shape[0], symmetric.shape[0]
        flat = torch.cat([dense, pooled], dim=1)
        vectors = flat.view(batch, num_vectors, flat.shape[1] // num_vectors)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        ctx.save_for_backward(vectors, symmetric)
        ctx.kept, ctx.dense_width = kept, dense.shape[1]
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
        # one product and copies of its parts are faster than two products
        grad_vectors = torch.bmm(grad_products.view(batch, num_vectors, num_vectors), vectors).flatten(1)
        grad_dense, grad_pooled = grad_vectors[:, : ctx.dense_width], grad_vectors[:, ctx.dense_width :]
        if ctx.kept:
            grad_dense = grad_dense + grad[:, : ctx.kept]
        return grad_dense, grad_pooled, None, None, None


class PairwiseDots(nn.Module):
    """The dot products of all pairs of vectors, after the first `kept` numbers of the dense vector.

    The output is `[B, kept + (F + 1) * F / 2]`, or `[B, F * (F - 1) / 2]` without a dense vector. Pairs are
    listed by canonical feature, the dense vector first, lower triangle row by row, in whatever order the
    pooled input comes. Sharding delivers features in its own order, and undoing that in the gather's index
    costs nothing.

    Raises:
        ValueError: there are fewer than two vectors.
    """

    pairs: Tensor
    symmetric: Tensor

    def __init__(self, names: Sequence[str], kept: int = 0, *, has_dense: bool = True) -> None:
        super().__init__()
        self.names = list(names)
        self.kept = kept
        self._num_dense = int(has_dense)
        num_vectors = self._num_dense + len(self.names)
        if num_vectors < 2:
            raise ValueError(
                "the dot interaction of DLRM needs two vectors, but the data has one feature and no dense "
                "columns; set model.kind to dcnv2, deepfm, fm or lr, or add a column"
            )
        self.out_features = kept + num_vectors * (num_vectors - 1) // 2
        self.register_buffer("pairs", torch.empty(0, dtype=torch.int64), persistent=False)
        self.register_buffer("symmetric", torch.empty(0, dtype=torch.int64), persistent=False)
        self._indexed_order: list[str] = []

    def _index(self, names: Sequence[str], device: torch.device) -> None:
        position = {name: self._num_dense + place for place, name in enumerate(names)}
        places = torch.tensor([*range(self._num_dense), *(position[name] for name in self.names)])
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
        """Multiply `dense` and `pooled` `[B, F * dim]` with the columns of features `names`.

        `dense` is `[B, dim]`, or `[B, 0]` if there is no dense vector.
        """
        if list(names) != self._indexed_order:
            self._index(names, pooled.device)
        if torch.compiler.is_exporting():  # a program for inference cannot write into a part of a tensor
            flat, num_vectors = torch.cat([dense, pooled], dim=1), self.symmetric.shape[0]
            vectors = flat.view(flat.shape[0], num_vectors, flat.shape[1] // num_vectors)
            products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
            return torch.cat([dense[:, : self.kept], products.index_select(1, self.pairs.view(-1))], dim=1)
        apply = cast("Callable[..., Tensor]", _Products.apply)
        return apply(dense, pooled, self.pairs, self.symmetric, self.kept)


class DotInteraction(PairwiseDots):
    """The dense vector, then the dot products of all pairs of vectors (DLRM, arXiv 1906.00091, 2.1.3)."""

    def __init__(self, names: Sequence[str], embedding_dim: int, *, has_dense: bool = True) -> None:
        super().__init__(names, kept=embedding_dim if has_dense else 0, has_dense=has_dense)


class DotHead(Head):
    """The tables of DLRM and their dot interaction, with the dense vector if there is one.

    Split by columns, each rank holds some dimensions of every table and computes all pairs' products over
    these; summing the partial products sends as many numbers for any dimension (derived from DES).
    """

    split_by: ClassVar[SplitBy] = "columns"

    def __init__(
        self, features: Sequence[Feature], dim: int, dtype: torch.dtype, *, has_dense: bool = True
    ) -> None:
        super().__init__(features, dim, dtype)
        self.interaction = DotInteraction(self.names, dim, has_dense=has_dense)
        self.products = PairwiseDots(self.names, has_dense=has_dense)
        self.out_features = self.interaction.out_features
        self._dim, self._has_dense = dim, has_dense

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute `[B, out_features]` from the features and the dense vector `[B, dim]`, if there is one."""
        pooled, names = self.pooled(sparse)
        interacted: Tensor = self.interaction(dense[0] if dense else pooled[:, :0], pooled, names)
        return interacted

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the interaction as `forward` does."""
        columns = owned.values[:, :0]
        if dense:
            columns = exchange.deal_columns(dense[0], owned.columns, owned.batch_sizes)
        # a rank without columns has no names, and its products are 0 in any order
        partial = self.products(columns, owned.values, owned.names or self.names)
        return torch.cat([*dense, exchange.sum_to_owners(partial, owned.batch_sizes)], dim=1)

    def traffic(self) -> SplitTraffic:
        """The columns of the dense vector and the products, in the dtype of the head."""
        size = self.dtype.itemsize
        dealt = Crossing(way="deal_columns", width=self._dim, value_bytes=size)
        summed = Crossing(way="sum_to_owners", width=self.products.out_features, value_bytes=size)
        return SplitTraffic(crossings=(dealt, summed) if self._has_dense else (summed,))


class DLRM(nn.Module):
    """Deep learning recommendation model: bottom MLP, dot interaction with the embeddings, top MLP.

    Without dense columns there is no bottom MLP, and the interaction is that of the embeddings alone.
    """

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__()
        has_dense = bool(inputs.dense)
        self.sparse = DotHead(inputs.features, inputs.embedding_dim, inputs.dtype, has_dense=has_dense)
        self.bottom = MLP(len(inputs.dense), options["bottom_mlp"]) if has_dense else None
        self.top = LogitMLP(self.sparse.out_features, options["top_mlp"])
        self.dtype = inputs.dtype

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        vector = [] if self.bottom is None else [self.bottom(dense.to(self.dtype))]
        logits: Tensor = self.top(self.sparse(sparse, *vector))
        return logits
