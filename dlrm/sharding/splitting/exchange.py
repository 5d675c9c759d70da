"""Collectives between the split operators and the rest of a model, with gradients.

Outside split operators every rank has its own samples; inside, every rank has all samples and a part of the
operator. Each function that enters or leaves has its reverse as backward pass. Outside, gradients are of the
rank's own mean loss; inside, of the mean over all ranks. So they are divided by the number of ranks where
they enter, as in TorchRec's exchange of pooled embeddings, and multiplied where they leave. The samples of
all ranks are concatenated in the order of ranks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor

GATHER: Final = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER: Final = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""Names of the all-gather and reduce-scatter functions, which torch 2.13 renamed."""


class SplitExchange:
    """Moves partial results between the ranks of a group; each method is a collective.

    Args:
        group: of the ranks.
        wire_dtype: numbers are rounded to this dtype to travel; None: they travel as they are. Sums are made
            in the dtype of the partial results, at least fp32. In fp16, gradients are multiplied by about the
            number of samples, since those of a mean are too small; numbers beyond 65,504 overflow.
    """

    def __init__(self, group: dist.ProcessGroup, wire_dtype: torch.dtype | None = None) -> None:
        self.rank: Final = dist.get_rank(group)
        self.world_size: Final = dist.get_world_size(group)
        self.wire_dtype: Final = wire_dtype
        self._group = group

    def sum_to_owners(self, partial: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """Sum all ranks' partial results into each rank's own samples.

        A reduce-scatter, backward an all-gather.

        From `[sum of batch_sizes, ...]` to `[batch_sizes[rank], ...]`, in the dtype of `partial`.
        """
        scale = self.gradient_scale(sum(batch_sizes))

        def backward(grad: Tensor) -> Tensor:
            gathered = self.gather(grad / (self.world_size / scale), batch_sizes)
            return _divided(gathered.to(grad.dtype), scale)

        return self._apply(partial, lambda tensor: self.reduce_scatter(tensor, batch_sizes), backward)

    def sum_to_all(self, partial: Tensor) -> Tensor:
        """Sum all ranks' partial results for all samples on every rank; gradients are summed too.

        The result has the shape and dtype of `partial`, is equal to the last bit on all ranks, and stays
        inside the split operator: what each rank computes from it is partial again.
        """
        scale = self.gradient_scale(partial.shape[0])

        def backward(grad: Tensor) -> Tensor:
            return _divided(self.all_reduce(grad if scale == 1 else grad * scale), scale)

        return self._apply(partial, self.all_reduce, backward)

    def deal_columns(self, own: Tensor, widths: Sequence[int], batch_sizes: Sequence[int]) -> Tensor:
        """Distribute the columns of all ranks' samples over the ranks.

        From this rank's samples, `[batch_sizes[rank], sum of widths]`, to its columns of all samples, `[sum
        of batch_sizes, widths[rank]]`.
        """
        width, batch = widths[self.rank], batch_sizes[self.rank]
        of_own, of_all = [each * batch for each in widths], [width * each for each in batch_sizes]
        scale = self.gradient_scale(sum(batch_sizes))

        def forward(tensor: Tensor) -> Tensor:
            sent = torch.cat([piece.flatten() for piece in torch.split(tensor, list(widths), dim=1)])
            received = self.all_to_all(sent, of_own, of_all)
            return received.view(sum(batch_sizes), width).to(tensor.dtype)

        def backward(grad: Tensor) -> Tensor:
            sent = grad.reshape(-1) if scale == 1 else grad.reshape(-1) * scale
            pieces = torch.split(self.all_to_all(sent, of_all, of_own), of_own)
            columns = [piece.view(batch, each) for piece, each in zip(pieces, widths, strict=True)]
            return torch.cat(columns, dim=1).to(grad.dtype) * (self.world_size / scale)

        return self._apply(own, forward, backward)

    def all_to_all(self, sent: Tensor, to_each: Sequence[int], from_each: Sequence[int]) -> Tensor:
        """Send `to_each` rows of `sent` to each rank and receive `from_each`, in the wire dtype."""
        wire = sent.to(self.wire_dtype or sent.dtype).contiguous()
        received = wire.new_empty((sum(from_each), *wire.shape[1:]))
        dist.all_to_all_single(received, wire, list(from_each), list(to_each), group=self._group)
        return received

    def gather(self, own: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """All ranks' rows in the order of ranks, in the wire dtype."""
        wire = own.to(self.wire_dtype or own.dtype).contiguous()
        if len(set(batch_sizes)) > 1:  # all-gathers need equal sizes
            sent = wire.repeat(self.world_size, *[1] * (wire.dim() - 1))
            return self.all_to_all(sent, [wire.shape[0]] * self.world_size, batch_sizes)
        gathered = wire.new_empty((sum(batch_sizes), *wire.shape[1:]))
        getattr(dist, GATHER)(gathered, wire, group=self._group)
        return gathered

    def reduce_scatter(self, partial: Tensor, batch_sizes: Sequence[int]) -> Tensor:
        """This rank's rows of the sum over ranks, in the dtype of `partial`."""
        own = batch_sizes[self.rank]
        if partial.is_cuda and len(set(batch_sizes)) == 1 and self._is_exact(partial):
            total = partial.new_empty((own, *partial.shape[1:]))
            getattr(dist, SCATTER)(total, partial.contiguous(), group=self._group)
            return total
        # on the CPU faster than gloo's reduce-scatter, and sums are in fp32 whatever the wire dtype
        received = self.all_to_all(partial, batch_sizes, [own] * self.world_size)
        pieces = received.view(self.world_size, own, *partial.shape[1:])
        return pieces.sum(0, dtype=torch.promote_types(partial.dtype, torch.float32)).to(partial.dtype)

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum over ranks, in the dtype of `partial`."""
        if self._is_exact(partial):
            total = partial.clone(memory_format=torch.contiguous_format)  # the collective works in place
            dist.all_reduce(total, group=self._group)
            return total
        # a collective would round every partial sum
        share, more = divmod(partial.numel(), self.world_size)
        shares = [share + (rank < more) for rank in range(self.world_size)]
        total = self.gather(self.reduce_scatter(partial.reshape(-1), shares), shares)
        return total.to(partial.dtype).view(partial.shape)

    def gradient_scale(self, num_samples: int) -> float:
        """Factor by which gradients of a mean over `num_samples` are multiplied while they travel."""
        # a power of two, so that scaling itself rounds nothing
        return 2.0 ** (num_samples - 1).bit_length() if self.wire_dtype == torch.float16 else 1.0

    def _is_exact(self, partial: Tensor) -> bool:
        """Whether a collective that sums in the dtype in which it sends rounds no more than it should."""
        return self.wire_dtype in (None, partial.dtype) and partial.dtype.itemsize >= 4

    def _apply(self, tensor: Tensor, *ways: Callable[[Tensor], Tensor]) -> Tensor:
        apply = cast("Callable[..., Tensor]", _Crossing.apply)
        return tensor if self.world_size == 1 else apply(tensor, *ways)


class _Crossing(torch.autograd.Function):
    """A collective, and that of its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.way_back = backward
        return forward(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.way_back(grad), None, None


def _divided(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1 else tensor.div_(scale)
