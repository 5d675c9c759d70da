"""Heads: tables and the operator over them, which can be split so that tables and weights stay in place.

A head is an ordinary module: unsharded, or with only its tables sharded, `forward` computes the operator from
pooled embeddings that TorchRec has brought to the samples' ranks. Under `HeadSharder` it is `split` instead.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.sharding.pooled import PooledFeatures
from dlrm.sharding.splitting.costs import SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.operator_tables import Placement

SplitBy = Literal["tables", "columns", "rows"]


@dataclass(frozen=True, eq=False, kw_only=True)
class Owned:
    """What a rank has looked up for the samples of all ranks, in the tables or parts that it owns."""

    values: Tensor
    """Pooled embeddings `[B, sum of widths]`, in the dtype of the head; `B` counts all ranks' samples."""
    names: Sequence[str]
    """The feature of each piece of `values`."""
    batch_sizes: Sequence[int]
    """Samples of each rank."""
    columns: Sequence[int]
    """Split by columns: how many columns of every table each rank has. Otherwise all have all, or none."""


class Head(PooledFeatures):
    """Tables and an operator over their pooled embeddings.

    Args: as for `PooledFeatures`.
    """

    split_by: ClassVar[SplitBy]
    """What is dealt out to the ranks: whole tables, or the columns or rows of each table."""
    also_by: ClassVar[tuple[SplitBy, ...]] = ()
    """What else `split` is exact for."""
    weight_dim: ClassVar[int | None] = None
    """Columns that a parameter server's tables would need; None: as many as TorchRec's tables have."""

    @abstractmethod
    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """The operator's result for this rank's samples, `[B, ...]`."""

    @property
    def has_weights(self) -> bool:
        """Whether weights become tables when it is split: it has other parameters then."""
        return type(self).co_locate is not Head.co_locate

    def co_locate(self, placement: Placement) -> None:
        """Before it is split: replace weights by `OperatorTables`, for those operators that have any."""
        return

    @abstractmethod
    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """The same, from what all ranks together have looked up."""

    @abstractmethod
    def traffic(self) -> SplitTraffic:
        """What `split` sends through its exchange, in order: the planner counts on it."""
