"""Linear models and factorization machines without a network: `lr` and `fm`."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models.contract import ModelInputs
from dlrm.models.mlp import Linear
from dlrm.sharding.splitting.costs import Crossing, SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned, SplitBy

WIDE_DIM: Final = 4
"""Columns of the tables of the linear part, FBGEMM's minimum; an id's weight is the first of them."""
WEIGHT_STD: Final = 1e-4
"""Standard deviation of the initial weights of the linear part, as in DeepCTR (`init_std`)."""
FACTOR_STD: Final = 0.01
"""Standard deviation of the initial embeddings of a factorization machine, as in
ChenglongChen/tensorflow-DeepFM: small, as the products of hundreds of pairs add up to one logit. At DeepCTR's
1e-4 the gradients, which are sums of embeddings, nearly vanish: a warm-up of the rates stalls there, and
without one Adagrad's first steps decide by chance where training ends."""


def uniform_bound(std: float) -> float:
    """Bound of the uniform distribution around 0 with this standard deviation."""
    return 3**0.5 * std


def weights_in(pooled: Tensor) -> Tensor:
    """Sum of the weights of all fields, `[B, F * WIDE_DIM]` to `[B, 1]`.

    The other columns have zero gradients. A sum over all would learn at `WIDE_DIM` times the learning rate.
    """
    return pooled[:, ::WIDE_DIM].sum(1, keepdim=True)


class LinearHead(Head):
    """Sum of the weights of all ids of a sample (logistic regression; "wide").

    Split by tables, each rank sums over its own fields: one number a sample (DES, LR).
    """

    split_by: ClassVar[SplitBy] = "tables"
    also_by: ClassVar[tuple[SplitBy, ...]] = ("rows",)
    weight_dim: ClassVar[int | None] = 1
    initial_bound: ClassVar[float | None] = uniform_bound(WEIGHT_STD)

    def __init__(self, features: Sequence[Feature], prefix: str = "") -> None:
        super().__init__(features, WIDE_DIM, torch.float32, prefix)

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute fp32 `[B, 1]`."""
        return weights_in(self.pooled(sparse)[0])

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the sum as `forward` does."""
        return exchange.sum_to_owners(weights_in(owned.values), owned.batch_sizes)

    def traffic(self) -> SplitTraffic:
        """One fp32 number a sample; TorchRec's exchange sends `WIDE_DIM` numbers per table instead."""
        return SplitTraffic(crossings=(Crossing(way="sum_to_owners", width=1),))


class FMHead(Head):
    """Sum of the dot products of all pairs of embeddings, by the sum-of-squares identity (DES, FM).

    Split by tables, each rank sums its fields' vectors and their squares: `dim + 1` numbers a sample.
    """

    split_by: ClassVar[SplitBy] = "tables"
    initial_bound: ClassVar[float | None] = uniform_bound(FACTOR_STD)

    def __init__(self, features: Sequence[Feature], dim: int, dtype: torch.dtype) -> None:
        super().__init__(features, dim, dtype)
        self._dim = dim

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute fp32 `[B, 1]`."""
        return pairs_of(sums_of(self.pooled(sparse)[0], self._dim))

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the sum as `forward` does."""
        return pairs_of(exchange.sum_to_owners(sums_of(owned.values, self._dim), owned.batch_sizes))

    def traffic(self) -> SplitTraffic:
        """The sums, in fp32, because squares would lose too much in bf16."""
        return SplitTraffic(crossings=(Crossing(way="sum_to_owners", width=self._dim + 1),))


@torch.fx.wrap  # so that TorchRec's pipelines can trace a model
def sums_of(pooled: Tensor, dim: int) -> Tensor:
    """Per sample, sum the vectors and sum the squares of all their numbers: `[B, F * dim]` to `[B, dim + 1]`.

    In fp32, or in the input's dtype if that is wider. Results for disjoint sets of fields may be added.
    """
    wide = torch.promote_types(pooled.dtype, torch.float32)
    vectors = pooled.to(wide).view(pooled.shape[0], pooled.shape[1] // dim, dim)  # a rank may have no fields
    return torch.cat([vectors.sum(1), vectors.square().sum((1, 2)).unsqueeze(1)], dim=1)


def pairs_of(sums: Tensor) -> Tensor:
    """Sum of the dot products of all pairs, `[B, 1]`, from the sums over all fields, `[B, dim + 1]`."""
    return 0.5 * (sums[:, :-1].square().sum(1, keepdim=True) - sums[:, -1:])


class LogisticRegression(nn.Module):
    """One weight per id and one per dense feature."""

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__()
        self.wide = LinearHead(inputs.features, prefix="linear_")
        self.wide_dense = Linear(len(inputs.dense), 1, relu=False)
        nn.init.normal_(self.wide_dense.weight, std=WEIGHT_STD)
        nn.init.zeros_(self.wide_dense.bias)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        out: Tensor = (self.wide(sparse) + self.wide_dense(dense)).squeeze(1)
        return out


class FactorizationMachine(LogisticRegression):
    """Logistic regression plus a factorization machine (Rendle, 2010) over the sparse features.

    `inputs.dtype` is that of exchanged embeddings; the arithmetic is fp32.
    """

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__(options, inputs)
        self.sparse = FMHead(inputs.features, inputs.embedding_dim, inputs.dtype)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        out: Tensor = super().forward(dense, sparse) + self.sparse(sparse).squeeze(1)
        return out
