"""DCN-v2 (Wang et al., arXiv 2008.13535) in MLPerf's shape: bottom MLP, low-rank cross layers, top MLP.

Split by tables, a rank holds the columns of the crossed vector that belong to its fields, and the rows of all
weights that these columns are multiplied with. So no embedding and no weight crosses the network. The dense
vector is treated as one more field, whole on a single rank. Dealing out its columns would send as many
numbers, few next to the layers' sums, but would make the names and shapes of its weight tables depend on the
number of ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from data.dataset import Feature
from dlrm.models import mlp
from dlrm.models.contract import ModelInputs
from dlrm.models.mlp import Linear
from dlrm.sharding.splitting.costs import Crossing, SplitTraffic
from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned, SplitBy
from dlrm.sharding.splitting.layout import neighbour_of_dense
from dlrm.sharding.splitting.operator_tables import OperatorTables, Placement


class LowRankCross(nn.Module):
    """Cross layers `x <- x0 * (W (V x) + b) + x`, with `V: width -> rank` and `W: rank -> width`.

    The initial values are those of TorchRec's `LowRankCrossNet`: Xavier's normal distribution, and no bias.
    """

    def __init__(self, width: int, rank: int, num_layers: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(Linear(width, rank, relu=False, bias=False) for _ in range(num_layers))
        self.up = nn.ModuleList(Linear(rank, width, relu=False) for _ in range(num_layers))
        for layer in self.up:
            nn.init.zeros_(cast("Tensor", layer.bias))

    def forward(self, x0: Tensor) -> Tensor:
        """Map `[B, width]` to `[B, width]`."""
        x = x0
        for down, up in zip(self.down, self.up, strict=True):
            x = torch.addcmul(x, x0, up(down(x)))
        return x


class CrossTables(nn.Module):
    """Cross layers with their weights in tables next to the tables of the fields."""

    def __init__(self, cross: LowRankCross, placement: Placement) -> None:
        super().__init__()

        def as_tables(name: str, weights: list[Tensor]) -> nn.ModuleList:
            return nn.ModuleList(
                OperatorTables(f"cross_{name}_{layer}_", weight, placement)
                for layer, weight in enumerate(weights)
            )

        down, up = ([cast("Linear", layer) for layer in layers] for layers in (cross.down, cross.up))
        self.down = as_tables("down", [layer.weight.t() for layer in down])
        self.up = as_tables("up", [layer.weight for layer in up])
        # one table per field for all layers' biases, because tiny tables cost a lookup each
        biases = torch.stack([layer.bias for layer in up], dim=1)
        self.bias = OperatorTables("cross_bias_", biases, placement)

    def forward(self, x0: Tensor, exchange: SplitExchange) -> Tensor:
        """Map `[B, columns]` to `[B, columns]`: the samples of all ranks, the fields of this one.

        A layer is elementwise except for `V x`, the only sum over the columns of other ranks.
        """
        down, up = (
            [cast("OperatorTables", layer).weight() for layer in layers] for layers in (self.down, self.up)
        )
        x = x0
        for v, w, b in zip(down, up, self.bias.weight().unbind(1), strict=True):
            hidden = exchange.sum_to_all(mlp.product(x, v.t()))
            x = torch.addcmul(x, x0, mlp.product(hidden, w, b))
        return x


class CrossHead(Head):
    """The tables of DCN-v2, the cross layers over embeddings and any dense vector, and the MLP on top.

    Split by tables, ranks sum the inner result of each cross layer and of the MLP's first layer: `num_layers
    * rank + width` numbers a sample (derived from DES). The other MLP layers are replicated.
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
        *,
        has_dense: bool = True,
    ) -> None:
        super().__init__(features, dim, dtype)
        width = (len(features) + has_dense) * dim
        self.cross = LowRankCross(width, rank, num_layers)
        self.top = mlp.LogitMLP(width, top_mlp).apply(mlp.draw_as_torchrec)
        self._dim, self._rank, self._num_layers = dim, rank, num_layers
        self._has_dense = has_dense
        self._dealt: list[int] = []

    def forward(self, sparse: KeyedJaggedTensor, *dense: Tensor) -> Tensor:
        """Compute fp32 logits `[B]` from the features and the dense vector `[B, dim]`, if there is one."""
        logits: Tensor = self.top(self.cross(torch.cat([*dense, self.in_order(sparse).flatten(1)], dim=1)))
        return logits

    def co_locate(self, placement: Placement) -> None:
        """Move the cross layers and the weight of the MLP's first layer into tables.

        Its bias is added once, outside.
        """
        if self._has_dense:
            placement, self._dealt = with_dense_vector(placement, self._dim)
        self.cross_tables = CrossTables(self.cross, placement)
        del self.cross
        self.first = OperatorTables("first_", self.top.first.weight.t(), placement)
        self.top.first.narrow(0)

    @torch.no_grad()
    def merge(self, rows_of: Callable[[str], Tensor]) -> None:
        """Undo `co_locate`."""
        biases = rows_of("cross_bias_")
        for layer, (down, up) in enumerate(zip(self.cross.down, self.cross.up, strict=True)):
            v, w = cast("Linear", down), cast("Linear", up)
            v.weight.copy_(rows_of(f"cross_down_{layer}_")[:, : self._rank].t())
            w.weight.copy_(rows_of(f"cross_up_{layer}_")[:, : self._rank])
            w.bias.copy_(biases[:, layer])
        first = self.top.first
        first.weight.copy_(rows_of("first_")[:, : first.out_features].t())

    def split(self, owned: Owned, *dense: Tensor, exchange: SplitExchange) -> Tensor:
        """Compute the logits as `forward` does, after `co_locate`."""
        dealt = [exchange.deal_columns(each, self._dealt, owned.batch_sizes) for each in dense]
        # also on ranks without columns, because the backward pass is a collective
        crossed = self.cross_tables(torch.cat([*dealt, owned.values], dim=1), exchange)
        partial = mlp.product(crossed.to(self.top.first_dtype(self.dtype)), self.first.weight().t())
        none = crossed.new_empty(owned.batch_sizes[exchange.rank], 0)  # all inputs are in the product
        logits: Tensor = self.top(none, exchange.sum_to_owners(partial, owned.batch_sizes))
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
        dealt = Crossing(way="deal_columns", width=self._dim, value_bytes=size)
        return SplitTraffic(
            crossings=(*[dealt] * self._has_dense, *[hidden] * self._num_layers, out),
            replicated=sum(parameter.numel() for parameter in self.top.parameters()) - first.weight.numel(),
        )


def with_dense_vector(placement: Placement, dim: int) -> tuple[Placement, list[int]]:
    """Add the dense vector of `dim` columns to a placement as its first field.

    Returns the placement of all fields, and the number of columns of the dense vector on each rank.
    """
    fields = list(placement.fields.values())
    owners = [field.ranks[0] for field in fields]
    place = neighbour_of_dense(owners)
    name = "dense"
    while name in placement.fields:  # avoid the name of a feature
        name += "_"
    here = [name] if owners[place] == placement.env.rank else []
    together = replace(
        placement,
        fields={name: fields[place], **placement.fields},
        names=[*here, *placement.names],
    )
    return together, [dim if rank == owners[place] else 0 for rank in range(placement.env.world_size)]


class DCNv2(nn.Module):
    """Deep and cross network, stacked: cross layers over the dense vector and all embeddings, then an MLP.

    Without dense columns there is no bottom MLP, and the embeddings alone are crossed. The initial values are
    those of TorchRec's `DLRM_DCN`, which MLPerf's reference trains.
    """

    def __init__(self, options: Mapping[str, Any], inputs: ModelInputs) -> None:
        super().__init__()
        has_dense = bool(inputs.dense)
        self.bottom = (
            mlp.MLP(len(inputs.dense), options["bottom_mlp"]).apply(mlp.draw_as_torchrec)
            if has_dense
            else None
        )
        top, layers, rank = options["top_mlp"], options["cross_layers"], options["cross_rank"]
        self.sparse = CrossHead(
            inputs.features, inputs.embedding_dim, top, layers, rank, inputs.dtype, has_dense=has_dense
        )
        self.dtype = inputs.dtype

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        """Compute fp32 logits `[B]` from dense `[B, num_dense]` and `B` bags a feature."""
        vector = [] if self.bottom is None else [self.bottom(dense.to(self.dtype))]
        logits: Tensor = self.sparse(sparse, *vector)
        return logits
