"""Heads: tables with an operator over them that can be split, so that tables and weights stay in place.

Unsharded, or with only its tables sharded, a head computes its operator in `forward`, from pooled embeddings
that TorchRec brought to the samples' ranks. Under `HeadSharder` its `split` is called instead.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
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
    """Embeddings that a rank has looked up in its own tables, or parts of tables, for all ranks' samples."""

    values: Tensor
    """Pooled embeddings `[B, sum of widths]` in the dtype of the head; `B` counts all ranks' samples."""
    names: Sequence[str]
    """Feature of each piece of `values`."""
    batch_sizes: Sequence[int]
    """Samples of each rank."""
    columns: Sequence[int]
    """Split by columns: number of columns of every table on each rank; otherwise all or none."""


class Head(PooledFeatures):
    """Tables and an operator over their pooled embeddings that can be split over ranks."""

    split_by: ClassVar[SplitBy]
    """What is distributed over ranks: whole tables, or the columns or rows of each table."""
    also_by: ClassVar[tuple[SplitBy, ...]] = ()
    """Other ways of splitting for which `split` is exact."""
    weight_dim: ClassVar[int | None] = None
    """Columns that a parameter server's tables would need; None: as many as TorchRec's tables have."""

    @abstractmethod
    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute the operator for this rank's samples, `[B, ...]`."""

    @property
    def has_weights(self) -> bool:
        """Whether weights become tables when the head is split, so that it has other parameters."""
        return type(self).co_locate is not Head.co_locate

    def co_locate(self, placement: Placement) -> None:
        """Replace weights by `OperatorTables` before a split; not overridden by operators without weights."""
        return

    def merge(self, rows_of: Callable[[str], Tensor]) -> None:
        """Undo `co_locate` in an unsplit head, into which everything but tables was loaded.

        `rows_of` gives the rows of all operator tables of a prefix, fields in canonical order, as fp32 `[F *
        rows, columns]`; there may be more columns than the weight has.
        """
        return

    @abstractmethod
    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the same as `forward`, from what all ranks together have looked up."""

    @abstractmethod
    def traffic(self) -> SplitTraffic:
        """What `split` sends, in order, for the planner."""
