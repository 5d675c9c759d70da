"""DCN-v2's low-rank cross layers (Wang et al., arXiv 2008.13535), whole or in slices of their width.

Split by tables, a rank has the columns of the crossed vector that belong to its fields, and the rows of all
weights that are multiplied with them: no embedding crosses the network, nor any weight. The dense vector is
one field more. It goes to a single rank, whole, rather than being dealt out: as many numbers cross in all,
few beside the layers' sums, and its rows of the weights are tables like those of the other fields, whose
names and shapes depend on no number of ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models import mlp
from dlrm.models.mlp import Linear
from dlrm.sharding.splitting.costs import Crossing, SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned, SplitBy
from dlrm.sharding.splitting.layout import neighbour_of_dense
from dlrm.sharding.splitting.operator_tables import OperatorTables, Placement


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


def cross_slice(
    x0: Tensor,
    down: Sequence[Tensor],
    up: Sequence[Tensor],
    bias: Sequence[Tensor],
    exchange: SplitExchange,
) -> Tensor:
    """Some columns of what the cross layers put out, from the same columns of their input.

    A layer is elementwise but for `V x`, the one thing that ranks with other columns have to add to.

    Args:
        x0: `[B, columns]`, of the samples of all ranks; columns may be 0.
        down: these rows of `V^T` of each layer, `[columns, rank]`.
        up: these rows of `W`, `[columns, rank]`.
        bias: these numbers of `b`, `[columns]`.
        exchange: sums over the ranks, once a layer and once more for its gradient.

    Returns:
        `[B, columns]`.
    """
    x = x0
    for v, w, b in zip(down, up, bias, strict=True):
        hidden = exchange.sum_to_all(mlp.product(x, v.t()))
        x = torch.addcmul(x, x0, mlp.product(hidden, w, b))
    return x


class CrossTables(nn.Module):
    """Cross layers whose weights lie beside the fields.

    Args:
        cross: unsplit.
        placement: of the fields that its input consists of.
    """

    def __init__(self, cross: LowRankCross, placement: Placement) -> None:
        super().__init__()

        def beside(name: str, weights: list[Tensor]) -> nn.ModuleList:
            return nn.ModuleList(
                OperatorTables(f"cross_{name}_{layer}_", weight, placement)
                for layer, weight in enumerate(weights)
            )

        down, up = ([cast("Linear", layer) for layer in layers] for layers in (cross.down, cross.up))
        self.down = beside("down", [layer.weight.t() for layer in down])
        self.up = beside("up", [layer.weight for layer in up])
        # one table a field for all layers' biases
        biases = torch.stack([layer.bias for layer in up], dim=1)
        self.bias = OperatorTables("cross_bias_", biases, placement)

    def forward(self, x0: Tensor, exchange: SplitExchange) -> Tensor:
        """`[B, columns]` to `[B, columns]`, of the samples of all ranks and the fields of this one."""
        down, up = (
            [cast("OperatorTables", layer).weight() for layer in layers] for layers in (self.down, self.up)
        )
        return cross_slice(x0, down, up, self.bias.weight().unbind(1), exchange)


class CrossHead(Head):
    """The tables of DCN-v2, its cross layers over these and the dense vector, and the MLP over those.

    Split by tables, ranks sum the inner result of each cross layer and the result of the MLP's first layer:
    `num_layers * rank + width` numbers a sample. Derived from DES. The rest of the MLP belongs to the samples
    and is replicated.

    Args:
        features: sparse features in canonical order; one table each.
        dim: columns of each table, and of the dense vector.
        top_mlp: widths of the MLP; the last is 1.
        num_layers: number of cross layers.
        rank: of their weights.
        dtype: of the arithmetic; parameters are fp32.
    """

    split_by: ClassVar[SplitBy] = "tables"

    def __init__(
        self,
        features: Sequence[Feature],
        dim: int,
        top_mlp: Sequence[int],
        num_layers: int,
        rank: int,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(features, dim, dtype)
        width = (len(features) + 1) * dim
        self.cross = LowRankCross(width, rank, num_layers)
        self.top = mlp.LogitMLP(width, top_mlp)
        self._dim, self._rank, self._num_layers = dim, rank, num_layers
        self._dealt: list[int] = []

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """fp32 logits `[B]`, of the dense vector `[B, dim]` too."""
        (vector,) = dense
        logits: Tensor = self.top(self.cross(torch.cat([vector, self.in_order(sparse).flatten(1)], dim=1)))
        return logits

    def co_locate(self, placement: Placement) -> None:
        """All weights but those of the MLP's other layers, and the bias of its first, which is added once."""
        placement, self._dealt = with_dense_vector(placement, self._dim)
        self.cross_tables = CrossTables(self.cross, placement)
        del self.cross
        self.first = OperatorTables("first_", self.top.first.weight.t(), placement)
        self.top.first.narrow(0)

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """As `forward`, once `co_locate` has been called."""
        (vector,) = dense
        dealt = exchange.deal_columns(vector, self._dealt, owned.batch_sizes)
        # on all ranks, even without columns: all wait for each other in its backward pass
        crossed = self.cross_tables(torch.cat([dealt, owned.values], dim=1), exchange)
        partial = mlp.product(crossed.to(self.top.first_dtype(self.dtype)), self.first.weight().t())
        logits: Tensor = self.top(vector[:, :0], exchange.sum_to_owners(partial, owned.batch_sizes))
        return logits

    def traffic(self) -> SplitTraffic:
        """The dense vector to one rank, and the sums, in the dtype of the arithmetic."""
        first, size = self.top.first, self.dtype.itemsize
        hidden = Crossing(way="sum_to_all", width=self._rank, value_bytes=size)
        out = Crossing(
            way="sum_to_owners",
            width=first.out_features,
            value_bytes=self.top.first_dtype(self.dtype).itemsize,
        )
        return SplitTraffic(
            crossings=(
                Crossing(way="deal_columns", width=self._dim, value_bytes=size),
                *[hidden] * self._num_layers,
                out,
            ),
            replicated=sum(parameter.numel() for parameter in self.top.parameters()) - first.weight.numel(),
        )


def with_dense_vector(placement: Placement, dim: int) -> tuple[Placement, list[int]]:
    """The dense vector as a first field.

    Args:
        placement: of the tables' fields.
        dim: columns of the dense vector.

    Returns:
        The placement of all fields, and how many columns of the dense vector each rank gets.
    """
    fields = list(placement.fields.values())
    owners = [field.ranks[0] for field in fields]
    place = neighbour_of_dense(owners)
    name = "dense"
    while name in placement.fields:  # a feature has that name
        name += "_"
    here = [name] if owners[place] == placement.env.rank else []
    together = replace(
        placement,
        fields={name: fields[place], **placement.fields},
        names=[*here, *placement.names],
    )
    return together, [dim if rank == owners[place] else 0 for rank in range(placement.env.world_size)]
