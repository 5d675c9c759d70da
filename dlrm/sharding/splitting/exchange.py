"""What crosses the network between partial results: sums of them, and columns dealt out.

A model has two regions. Outside the split operators every rank has samples of its own; inside, every rank
has all samples and a part of the operator. Each of the three ways over the border has the others' gradient as
its own backward pass, and gradients change their meaning on the way: outside they are of the rank's own mean
loss, inside of the mean over all ranks. So they are divided by the number of ranks where they enter, as in
TorchRec's exchange of pooled embeddings, and multiplied where they leave.

Samples of all ranks lie one rank after the other, in the order of ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """Moves partial results between the ranks of a group, each call made by all of them.

    Args:
        group: of the ranks.
        wire_dtype: what travels is rounded to, such as `torch.bfloat16`; None: it travels as it is. Sums are
            in the dtype of what is summed, or fp32 where that is smaller.
    """

    def __init__(self, group: dist.ProcessGroup, wire_dtype: torch.dtype | None = None) -> None:
        self.rank: Final = dist.get_rank(group)
        self.world_size: Final = dist.get_world_size(group)
        self.wire_dtype: Final = wire_dtype
        self._group = group

    def sum_to_owners(self, partial: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """Each rank's own samples, summed over all ranks' partial results; a reduce-scatter.

        Args:
            partial: `[sum of batch_sizes, width]`.
            batch_sizes: samples of each rank.

        Returns:
            `[batch_sizes[rank], width]`, the dtype of `partial`.
        """
        return self._apply(_SumToOwners, partial, batch_sizes)

    def sum_to_all(self, partial: Tensor) -> Tensor:
        """All samples, summed over all ranks' partial results, on every rank; gradients are summed as well.

        It stays inside: what is computed from it on each rank is partial again.

        Args:
            partial: equal in shape on all ranks.
        """
        apply = cast("Callable[..., Tensor]", _SumToAll.apply)
        return partial if self.world_size == 1 else apply(partial, self)

    def deal_columns(self, own: Tensor, widths: Sequence[int], batch_sizes: Sequence[int]) -> Tensor:
        """Some columns of all ranks' samples.

        Args:
            own: of this rank's samples, `[batch_sizes[rank], sum of widths]`.
            widths: columns that each rank gets.
            batch_sizes: samples of each rank.

        Returns:
            `[sum of batch_sizes, widths[rank]]`.
        """
        if self.world_size == 1:
            return own
        apply = cast("Callable[..., Tensor]", _DealColumns.apply)
        return apply(own, self, list(widths), list(batch_sizes))

    def all_to_all(self, sent: Tensor, to_each: Sequence[int], from_each: Sequence[int]) -> Tensor:
        """Send some rows, or numbers, of `sent` to each rank; what came from each, one after the other."""
        wire = sent.to(self.wire_dtype or sent.dtype).contiguous()
        received = wire.new_empty((sum(from_each), *wire.shape[1:]))
        dist.all_to_all_single(received, wire, list(from_each), list(to_each), group=self._group)
        return received

    def gather(self, own: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """All ranks' rows, one rank after the other; in the dtype that travelled."""
        wire = own.to(self.wire_dtype or own.dtype).contiguous()
        if len(set(batch_sizes)) > 1:  # no backend gathers tensors of different sizes at once
            sent = wire.repeat(self.world_size, *[1] * (wire.dim() - 1))
            return self.all_to_all(sent, [wire.shape[0]] * self.world_size, batch_sizes)
        gathered = wire.new_empty((sum(batch_sizes), *wire.shape[1:]))
        dist.all_gather_into_tensor(gathered, wire, group=self._group)
        return gathered

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks."""
        # a copy, for the collective works in place
        wire = partial.to(self.wire_dtype or partial.dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(wire, group=self._group)
        return wire.to(partial.dtype)

    def _apply(self, function: Any, tensor: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        if self.world_size == 1:
            return tensor
        moved: Tensor = function.apply(tensor, self, list(batch_sizes))
        return moved


class _SumToOwners(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, exchange: Exchange, batch_sizes: list[int]) -> Tensor:
        ctx.exchange, ctx.batch_sizes = exchange, batch_sizes
        own = batch_sizes[exchange.rank]
        # gloo's own reduce-scatter takes three times as long
        received = exchange.all_to_all(partial, batch_sizes, [own] * exchange.world_size)
        pieces = received.view(exchange.world_size, own, *partial.shape[1:])
        return pieces.sum(0, dtype=torch.promote_types(partial.dtype, torch.float32)).to(partial.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange = ctx.exchange
        gathered = exchange.gather(grad / exchange.world_size, ctx.batch_sizes)
        return gathered.to(grad.dtype), None, None


class _SumToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.exchange.all_reduce(grad), None


class _DealColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, exchange: Exchange, widths: list[int], batch_sizes: list[int]
    ) -> Tensor:
        ctx.exchange, ctx.widths, ctx.batch_sizes = exchange, widths, batch_sizes
        width = widths[exchange.rank]
        sent = torch.cat([piece.flatten() for piece in own.split(widths, dim=1)])
        to_each = [each * own.shape[0] for each in widths]
        received = exchange.all_to_all(sent, to_each, [width * batch for batch in batch_sizes])
        return received.view(-1, width).to(own.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        exchange, widths, batch_sizes = ctx.exchange, ctx.widths, ctx.batch_sizes
        width, batch = widths[exchange.rank], batch_sizes[exchange.rank]
        to_each = [width * each for each in batch_sizes]
        received = exchange.all_to_all(grad.reshape(-1), to_each, [each * batch for each in widths])
        pieces = received.split([each * batch for each in widths])
        own = torch.cat([piece.view(batch, each) for piece, each in zip(pieces, widths, strict=True)], dim=1)
        return own.to(grad.dtype) * exchange.world_size, None, None, None
