"""The linear ("wide") part of a model: one weight per id, summed over all ids of a sample."""

from collections.abc import Sequence
from typing import ClassVar, Final

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.sharding.splitting.costs import Crossing, SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned, SplitBy

WIDE_DIM: Final = 4
"""Columns of the tables of the linear part, FBGEMM's minimum; an id's weight is their sum."""


class LinearHead(Head):
    """Sum of the weights of all ids of a sample (logistic regression; "wide").

    Split by tables, each rank sums over its own fields: one number a sample (DES, LR).
    """

    split_by: ClassVar[SplitBy] = "tables"
    also_by: ClassVar[tuple[SplitBy, ...]] = ("rows",)
    weight_dim: ClassVar[int | None] = 1

    def __init__(self, features: Sequence[Feature], prefix: str = "") -> None:
        super().__init__(features, WIDE_DIM, torch.float32, prefix)

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute fp32 `[B, 1]`."""
        return self.pooled(sparse)[0].sum(1, keepdim=True)

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the sum as `forward` does."""
        return exchange.sum_to_owners(owned.values.sum(1, keepdim=True), owned.batch_sizes)

    def traffic(self) -> SplitTraffic:
        """One fp32 number a sample; TorchRec's exchange sends `WIDE_DIM` numbers per table instead."""
        return SplitTraffic(crossings=(Crossing(way="sum_to_owners", width=1),))
