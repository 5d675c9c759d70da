"""Lookup and fused update of FBGEMM's CPU tables by PyTorch's own CPU kernels.

FBGEMM's modules keep the weights and the optimizer state, so that TorchRec's sharding and `state_dict` see no
difference; only the module's `forward` is replaced. FBGEMM's CPU operators take three to four times as long
on the same rows (`python -m experiments.throughput`), and they cannot return bfloat16, which halves what
ranks exchange. Replicated tables get the same lookup, with a dense gradient for their optimizer.

The update is exact: gradients of all bags that read a row are summed first, then the optimizer sees that row
once, as in FBGEMM's exact optimizers (`dlrm.config.table_optimizers`).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, cast

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torch.nn.functional import embedding_bag

from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.sharding.splitting.operator_tables import WholeTables


def _rows_without_copy(grad: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """View `grad` `[B, F * width]` as rows of `width`, and the position of each row k of `[B * F, width]`.

    None: k.

    The interaction's gradient is all but the first vector of each sample: rows of one tensor, with gaps.
    """
    batch, stride = grad.shape[0], grad.stride(0)
    if grad.is_contiguous() or grad.stride(1) != 1 or stride % width or stride < grad.shape[1]:
        return grad.reshape(-1, width), None
    num_rows, gap = grad.shape[1] // width, stride // width
    slots = (torch.arange(batch) * gap).unsqueeze(1) + torch.arange(num_rows)
    return grad.as_strided(((batch - 1) * gap + num_rows, width), (width, 1)), slots.view(-1)


UPDATES: Final = {
    each.fbgemm_type: each.update_rows for each in TABLE_OPTIMIZERS.values() if each.update_rows is not None
}
"""Row updates in PyTorch, by FBGEMM's optimizer type."""


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # requires grad, so that autograd calls backward
        lookup: "HostLookup",
        reads: "Reads",
    ) -> Tensor:
        ctx.lookup, ctx.reads = lookup, reads
        return lookup.bags.pool(lookup.weights, reads)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        ctx.lookup.update(ctx.reads, grad)
        return None, None, None


class Reads(NamedTuple):
    """What a lookup reads from a joint table."""

    rows: Tensor
    """Of each id, `[N]`."""
    starts: Tensor
    """Where each bag starts among the rows, `[B * F]`."""
    places: Tensor | None
    """Row of the output, seen as `[B * F, dim]`, into which each id is summed, `[N]`; None: id k, row k."""
    factors: Tensor | None
    """Weight of each id, fp32 `[N]`; None: 1."""


class _Bags:
    """Maps feature-major ids to rows of one joint table, the stack of all tables of an FBGEMM module."""

    def __init__(
        self, table_rows: Sequence[int], feature_table_map: Sequence[int], dim: int, output_dtype: torch.dtype
    ) -> None:
        first_rows = torch.tensor([0, *table_rows]).cumsum(0)
        self.index_dtype = torch.int32 if int(first_rows[-1]) < 2**31 else torch.int64
        self.first_rows = first_rows[list(feature_table_map)].to(self.index_dtype)
        self.num_features = len(feature_table_map)
        self.dim = dim
        self.output_dtype = output_dtype
        self._one_hot_offsets = torch.zeros(1, dtype=torch.int64)
        self._one_hot_starts = torch.zeros(0, dtype=self.index_dtype)

    def reads(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None) -> Reads:
        """What the arguments of an FBGEMM module's `forward` read."""
        if per_sample_weights is not None and per_sample_weights.requires_grad:
            raise ValueError("weights of ids get no gradient in the host lookup; detach them")
        factors = None if per_sample_weights is None else per_sample_weights.to(torch.float32)
        num_bags = offsets.numel() - 1
        batch = num_bags // self.num_features
        indices = indices.to(self.index_dtype)
        if self._is_one_hot(indices, offsets):
            # read sample by sample, so that the output needs no transposition
            rows = (indices.view(self.num_features, batch) + self.first_rows.unsqueeze(1)).t().reshape(-1)
            if factors is not None:
                factors = factors.view(self.num_features, batch).t().reshape(-1)
            return Reads(rows, self._one_hot_starts, None, factors)
        ends = offsets[:: max(batch, 1)]
        rows = indices + self.first_rows.repeat_interleave(ends.diff()[: self.num_features])
        # bag (feature f, sample b) is row b * F + f of the output
        places = torch.arange(num_bags, dtype=self.index_dtype).view(batch, self.num_features).t().reshape(-1)
        places = places.repeat_interleave(offsets.diff())
        return Reads(rows, offsets[:-1].to(self.index_dtype), places, factors)

    def pool(self, weights: Tensor, reads: Reads) -> Tensor:
        """Sum the rows of each bag, each times its factor: `[B, F * dim]` in the output dtype."""
        pooled = self.sums(weights, reads)
        if reads.places is not None:
            pooled = pooled.view(self.num_features, -1, self.dim).transpose(0, 1)
        return pooled.reshape(-1, self.num_features * self.dim)

    def sums(self, weights: Tensor, reads: Reads) -> Tensor:
        """Sum the rows of each bag, each times its factor: `[bags, dim]`, in the output dtype."""
        table = weights.view(-1, self.dim)
        summed = embedding_bag(reads.rows, table, reads.starts, mode="sum", per_sample_weights=reads.factors)
        return summed.to(self.output_dtype)

    def _is_one_hot(self, indices: Tensor, offsets: Tensor) -> bool:
        if indices.numel() != offsets.numel() - 1:
            return False
        if self._one_hot_offsets.shape != offsets.shape:
            self._one_hot_offsets = torch.arange(offsets.numel(), dtype=torch.int64)
            self._one_hot_starts = self._one_hot_offsets[:-1].to(self.index_dtype)
        return torch.equal(offsets.to(torch.int64), self._one_hot_offsets)


class HostLookup:
    """Replaces `SplitTableBatchedEmbeddingBagsCodegen.forward` on the CPU; `suits` says for which modules."""

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, output_dtype: torch.dtype) -> None:
        self._tbe = tbe
        self._update = UPDATES[tbe.optimizer]
        self.bags = _Bags(
            [spec[0] for spec in tbe.embedding_specs], tbe.feature_table_map, tbe.dims[0], output_dtype
        )
        self._anchor = torch.zeros((), requires_grad=True)
        self.newest: Reads | None = None
        """What the newest lookup reads; None: there was none."""
        self.keeps_change = False
        """Whether each update sets `last_change`."""
        self.last_change: tuple[Tensor, Tensor] | None = None
        """Rows of the last update, int64 `[n]`, ascending, and what they were before, fp32 `[n, dim]`."""

    @staticmethod
    def suits(tbe: nn.Module) -> bool:
        """Whether `tbe` has fp32 host tables of one width, sum pooling and a supported optimizer."""
        return (
            isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen)
            and tbe.use_cpu
            and tbe.weights_precision == SparseType.FP32
            and tbe.pooling_mode == PoolingMode.SUM
            and tbe.optimizer in UPDATES
            and len(set(tbe.dims)) == 1
        )

    @property
    def weights(self) -> Tensor:
        """All tables of the module, flat."""
        flat: Tensor = self._tbe.weights_host.detach()
        return flat

    def __call__(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool `[B, F * dim]` from `F * B` bags, feature-major.

        Ids `[N]` and offsets `[F * B + 1]`.

        Each row is multiplied by its id's weight, if weights `[N]` are given; they get no gradient.

        `dlrm.sharding.bounds` has checked that each id is within its table.

        Raises:
            ValueError: the weights require a gradient.
        """
        self.newest = self.bags.reads(indices, offsets, per_sample_weights)
        apply = cast("Callable[..., Tensor]", _Lookup.apply)
        return apply(self._anchor, self, self.newest)

    def sums(self, reads: Reads) -> Tensor:
        """Sum the rows of some bags as a lookup does, without a gradient: `[bags, dim]`."""
        return self.bags.sums(self.weights, reads)

    def update(self, reads: Reads, grad: Tensor) -> None:
        """Sum the gradients of each row that was read, and let the optimizer update it.

        `grad` is that of the pooled embeddings, `[B, F * dim]`.
        """
        rows, _, places, factors = reads
        if rows.numel() == 0:
            return
        ordered, permutation = torch.sort(rows)
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        starts = (counts.cumsum(0) - counts).to(rows.dtype)
        sources = permutation if places is None else places[permutation]
        grad_rows, slots = _rows_without_copy(grad, self.bags.dim)
        if slots is not None:
            sources = slots[sources]
        if factors is not None:  # which must have the dtype of what they multiply
            grad_rows, factors = grad_rows.to(torch.float32), factors[permutation]
        sources = sources.to(rows.dtype)
        grads = embedding_bag(sources, grad_rows, starts, mode="sum", per_sample_weights=factors)
        unique = unique.to(torch.int64)
        if self.keeps_change:
            self.last_change = unique, self.weights.view(-1, self.bags.dim)[unique]
        self._update(self._tbe, unique, grads.to(torch.float32))


class ReplicatedLookup:
    """Replaces `DenseTableBatchedEmbeddingBagsCodegen.forward` of replicated tables on the CPU.

    Gradients go to `tbe.weights.grad`.
    """

    def __init__(self, tbe: DenseTableBatchedEmbeddingBagsCodegen, output_dtype: torch.dtype) -> None:
        self._tbe = tbe
        rows, dims = zip(*tbe.embedding_specs, strict=True)
        self._bags = _Bags(rows, range(len(rows)), dims[0], output_dtype)

    @staticmethod
    def suits(tbe: nn.Module) -> bool:
        """Whether `tbe` has fp32 host tables of one width, sum pooling and one feature each."""
        return (
            isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen)
            and tbe.use_cpu
            and tbe.weights.dtype == torch.float32
            and tbe.pooling_mode == PoolingMode.SUM
            and len({dim for _, dim in tbe.embedding_specs}) == 1
            and tbe.D_offsets.numel() - 1 == len(tbe.embedding_specs)
        )

    def __call__(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool as `HostLookup` does."""
        return self._bags.pool(self._tbe.weights, self._bags.reads(indices, offsets, per_sample_weights))


def use_host_lookups(tables: Iterable[nn.Module], output_dtype: torch.dtype) -> int:
    """Replace the lookup of every suitable FBGEMM module in `tables`, and return how many were replaced.

    Operator tables keep `WholeTables`, which is faster. Pieces without rows are replaced too, because their
    output needs the dtype of the other ranks' output.
    """
    replaced = 0
    for tbe in tables:
        if isinstance(tbe.forward, WholeTables):
            continue
        for lookup in (HostLookup, ReplicatedLookup):
            if lookup.suits(tbe):
                tbe.forward = lookup(tbe, output_dtype)
                replaced += 1
    return replaced
