"""The linear ("wide") part of a model: one weight an id, summed over all ids of a sample."""

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
"""Columns of the tables of the linear part: FBGEMM's smallest. Their sum is the one weight of an id."""


class LinearHead(Head):
    """Sum of the weights of all ids of a sample (logistic regression; "wide").

    Split by tables, each rank sums over the fields that it owns: one number a sample (DES, LR).

    Args:
        features: sparse features in canonical order; one table each.
        prefix: of the tables' names.
    """

    split_by: ClassVar[SplitBy] = "tables"
    also_by: ClassVar[tuple[SplitBy, ...]] = ("rows",)
    weight_dim: ClassVar[int | None] = 1

    def __init__(self, features: Sequence[Feature], prefix: str = "") -> None:
        super().__init__(features, WIDE_DIM, torch.float32, prefix)

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """fp32 `[B, 1]`."""
        return self.pooled(sparse)[0].sum(1, keepdim=True)

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """As `forward`."""
        return exchange.sum_to_owners(owned.values.sum(1, keepdim=True), owned.batch_sizes)

    def traffic(self) -> SplitTraffic:
        """One fp32 number a sample; plain TorchRec exchanges `WIDE_DIM` numbers a table instead."""
        return SplitTraffic(crossings=(Crossing(way="sum_to_owners", width=1),))
