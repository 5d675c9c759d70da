"""DeepFM (Guo et al., arXiv 1703.04247): linear part, factorization machine and deep part."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models import mlp
from dlrm.models.contract import ModelInputs
from dlrm.models.fm import FACTOR_STD, LogisticRegression, pairs_of, sums_of, uniform_bound
from dlrm.sharding.splitting.costs import Crossing, SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned, SplitBy
from dlrm.sharding.splitting.operator_tables import OperatorTables, Placement

torch.fx.wrap("sums_of")  # names are wrapped for each module


class DeepFMHead(Head):
    """Factorization machine and deep network on the same embeddings.

    Split by tables, each rank sums its fields' vectors and their squares, and multiplies the vectors with
    their rows of the deep part's first layer (DES, FM and first fully connected layer): `dim + 1 + width`
    numbers a sample in one exchange. The rest of the deep part, with the first layer's bias and dense
    columns, is replicated.
    """

    split_by: ClassVar[SplitBy] = "tables"
    initial_bound: ClassVar[float | None] = uniform_bound(FACTOR_STD)

    def __init__(
        self,
        features: Sequence[Feature],
        num_dense: int,
        dim: int,
        top_mlp: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(features, dim, dtype)
        self.deep = mlp.LogitMLP(num_dense + len(features) * dim, top_mlp)
        self._num_dense, self._dim = num_dense, dim

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute fp32 logits `[B]` from the features and the dense features `[B, num_dense]`."""
        (vector,) = dense
        embeddings = self.in_order(sparse).flatten(1)
        deep: Tensor = self.deep(torch.cat([vector.to(self.dtype), embeddings], dim=1))
        return pairs_of(sums_of(embeddings, self._dim)).squeeze(1) + deep

    def co_locate(self, placement: Placement) -> None:
        """Move the first layer's weights of the embeddings into tables; those of the dense features stay."""
        first = self.deep.first
        self.first = OperatorTables("first_", first.weight[:, self._num_dense :].t(), placement)
        first.narrow(self._num_dense)

    @torch.no_grad()
    def merge(self, rows_of: Callable[[str], Tensor]) -> None:
        """Undo `co_locate`."""
        first = self.deep.first
        first.weight[:, self._num_dense :].copy_(rows_of("first_")[:, : first.out_features].t())

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the logits as `forward` does, after `co_locate`."""
        (vector,) = dense
        dtype = self.deep.first_dtype(self.dtype)
        product = mlp.product(owned.values.to(dtype), self.first.weight().t())
        # fp32, because the result is a small difference of large squares
        partial = torch.cat([sums_of(owned.values, self._dim), product], dim=1)
        summed = exchange.sum_to_owners(partial, owned.batch_sizes)
        deep: Tensor = self.deep(vector.to(self.dtype), summed[:, self._dim + 1 :].to(dtype))
        return pairs_of(summed[:, : self._dim + 1]).squeeze(1) + deep

    def traffic(self) -> SplitTraffic:
        """The sums and the first layer's outputs, in fp32."""
        width = self.deep.first.out_features
        in_tables = len(self.names) * self._dim * width
        return SplitTraffic(
            crossings=(Crossing(way="sum_to_owners", width=self._dim + 1 + width),),
            replicated=sum(parameter.numel() for parameter in self.deep.parameters()) - in_tables,
        )


class DeepFM(LogisticRegression):
    """Linear part, factorization machine and deep network, the latter two on the same embeddings.

    The dense features enter the linear and the deep part.
    """

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__(options, inputs)
        self.sparse = DeepFMHead(
            inputs.features, len(inputs.dense), inputs.embedding_dim, options["top_mlp"], inputs.dtype
        )

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        out: Tensor = super().forward(dense, sparse) + self.sparse(sparse, dense)
        return out
