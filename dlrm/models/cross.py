"""DCN-v2's low-rank cross layers (Wang et al., arXiv 2008.13535), whole or in slices of their width."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dlrm.models.mlp import Linear, product
from dlrm.sharding.splitting.exchange import Exchange


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
    exchange: Exchange,
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
        hidden = exchange.sum_to_all(product(x, v.t()))
        x = torch.addcmul(x, x0, product(hidden, w, b))
    return x
