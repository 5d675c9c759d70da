"""Lookup and fused update of FBGEMM host tables by PyTorch's own CPU kernels.

The tables stay FBGEMM's: its modules own the weights and the optimizer state, so that TorchRec's
sharding, `state_dict` and everything built on them see no difference. Only `forward` of the module
is replaced. Two reasons: FBGEMM's CPU operators spend three to four times as long on the same rows
(`python -m experiments.throughput` shows where a step's time goes), and they cannot put out
bfloat16, which halves what ranks exchange.

The update is the exact one: the gradients of all bags that read a row are summed first, then the
optimizer sees that row once, as in FBGEMM's EXACT_SGD, EXACT_ROWWISE_ADAGRAD and EXACT_ADAGRAD.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn

RowUpdate = Callable[[SplitTableBatchedEmbeddingBagsCodegen, Tensor, Tensor], None]


def _rows_of(flat: Tensor, width: int) -> Tensor:
    return flat.detach().view(-1, width)


def _add_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    # scatter_add_ with an expanded index is the one row update of PyTorch that runs on all threads
    table.scatter_add_(0, rows.unsqueeze(1).expand_as(values), values)


def _sgd(tbe: SplitTableBatchedEmbeddingBagsCodegen, rows: Tensor, grads: Tensor) -> None:
    _add_rows(_rows_of(tbe.weights_host, grads.shape[1]), rows, grads.mul_(-tbe.get_learning_rate()))


def _rowwise_adagrad(tbe: SplitTableBatchedEmbeddingBagsCodegen, rows: Tensor, grads: Tensor) -> None:
    state = tbe.momentum1_host.detach()
    accumulated = state.index_select(0, rows).add_(grads.square().mean(1))
    state.index_copy_(0, rows, accumulated)
    scale = accumulated.sqrt_().add_(tbe.optimizer_args.eps).reciprocal_().mul_(-tbe.get_learning_rate())
    _add_rows(_rows_of(tbe.weights_host, grads.shape[1]), rows, grads.mul_(scale.unsqueeze(1)))


def _adagrad(tbe: SplitTableBatchedEmbeddingBagsCodegen, rows: Tensor, grads: Tensor) -> None:
    width = grads.shape[1]
    state = _rows_of(tbe.momentum1_host, width)
    _add_rows(state, rows, grads.square())
    root = state.index_select(0, rows).sqrt_().add_(tbe.optimizer_args.eps)
    _add_rows(_rows_of(tbe.weights_host, width), rows, grads.mul_(-tbe.get_learning_rate()).div_(root))


UPDATES: Final[dict[EmbOptimType, RowUpdate]] = {
    EmbOptimType.EXACT_SGD: _sgd,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _rowwise_adagrad,
    EmbOptimType.EXACT_ADAGRAD: _adagrad,
}


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,  # a tensor that requires grad, so that backward is called
        lookup: "HostLookup",
        rows: Tensor,
        starts: Tensor,
        bags: Tensor | None,
    ) -> Tensor:
        ctx.lookup, ctx.rows, ctx.bags = lookup, rows, bags
        return lookup.pool(rows, starts, one_hot=bags is None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        ctx.lookup.update(ctx.rows, ctx.bags, grad)
        return None, None, None, None, None


class HostLookup:
    """Stands in for `SplitTableBatchedEmbeddingBagsCodegen.forward` on the CPU.

    Args:
        tbe: the FBGEMM module; must be `suits`-able.
        output_dtype: of the pooled embeddings.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, output_dtype: torch.dtype) -> None:
        self._tbe = tbe
        self._update = UPDATES[tbe.optimizer]
        self._output_dtype = output_dtype
        self._dim = tbe.dims[0]
        table_rows = torch.tensor([0, *(spec[0] for spec in tbe.embedding_specs)]).cumsum(0)
        self._index_dtype = torch.int32 if int(table_rows[-1]) < 2**31 else torch.int64
        self._first_rows = table_rows[tbe.feature_table_map].to(self._index_dtype)
        self._anchor = torch.zeros((), requires_grad=True)
        self._one_hot_offsets = torch.zeros(1, dtype=torch.int64)

    @staticmethod
    def suits(tbe: nn.Module) -> bool:
        """Whether this lookup can stand in for `tbe`: fp32 host tables of one width, summed, a known optimizer."""
        return (
            isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen)
            and tbe.use_cpu
            and tbe.weights_precision == SparseType.FP32
            and tbe.pooling_mode == PoolingMode.SUM
            and tbe.optimizer in UPDATES
            and len(set(tbe.dims)) == 1
        )

    def __call__(self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None) -> Tensor:
        """Pooled embeddings `[B, F * dim]` of `F * B` bags, feature-major.

        Args:
            indices: int ids `[N]`, each within its table.
            offsets: int `[F * B + 1]`.
            per_sample_weights: not supported.

        Raises:
            ValueError: weights were given.
        """
        if per_sample_weights is not None:
            raise ValueError(
                "weighted bags are not supported by the host lookup; drop the weights of the KJT"
            )
        num_features = self._first_rows.numel()
        num_bags = offsets.numel() - 1
        batch = num_bags // num_features
        indices = indices.to(self._index_dtype)
        if self._is_one_hot(indices, offsets):
            # read sample by sample, so that the output needs no transposition
            rows = (indices.view(num_features, batch) + self._first_rows.unsqueeze(1)).t().reshape(-1)
            starts, bags = self._one_hot_offsets[:-1].to(self._index_dtype), None
        else:
            per_feature = offsets[::batch].diff() if batch else offsets.new_zeros(num_features)
            rows = indices + self._first_rows.repeat_interleave(per_feature)
            starts = offsets[:-1].to(self._index_dtype)
            # bag (feature f, sample b) puts its gradient at row b * F + f of the output's gradient
            order = torch.arange(num_bags, dtype=self._index_dtype).view(batch, num_features).t().reshape(-1)
            bags = order.repeat_interleave(offsets.diff())
        out: Tensor = _Lookup.apply(self._anchor, self, rows, starts, bags)  # type: ignore[no-untyped-call]
        return out

    def pool(self, rows: Tensor, starts: Tensor, one_hot: bool) -> Tensor:
        """Sum the table rows of each bag: `[B, F * dim]` in the output dtype."""
        weights = _rows_of(self._tbe.weights_host, self._dim)
        num_features = self._first_rows.numel()
        pooled = torch.embedding_bag(weights, rows, starts, mode=0)[0]
        if not one_hot:
            pooled = pooled.view(num_features, -1, self._dim).transpose(0, 1)
        return pooled.to(self._output_dtype).reshape(-1, num_features * self._dim)

    def update(self, rows: Tensor, bags: Tensor | None, grad: Tensor) -> None:
        """Sum the gradients of each row that was read and let the optimizer update it.

        Args:
            rows: table row of each id, `[N]`.
            bags: row of `grad`, seen as `[B * F, dim]`, that holds the gradient of each id; None: the same place.
            grad: gradient of the pooled embeddings, `[B, F * dim]`.
        """
        if rows.numel() == 0:
            return
        ordered, permutation = torch.sort(rows)
        unique, counts = torch.unique_consecutive(ordered, return_counts=True)
        starts = (counts.cumsum(0) - counts).to(self._index_dtype)
        sources = (permutation if bags is None else bags[permutation]).to(self._index_dtype)
        grads = torch.embedding_bag(grad.reshape(-1, self._dim), sources, starts, mode=0)[0]
        self._update(self._tbe, unique.to(torch.int64), grads.to(torch.float32))

    def _is_one_hot(self, indices: Tensor, offsets: Tensor) -> bool:
        if indices.numel() != offsets.numel() - 1:
            return False
        if self._one_hot_offsets.shape != offsets.shape:
            self._one_hot_offsets = torch.arange(offsets.numel(), dtype=torch.int64)
        return torch.equal(offsets.to(torch.int64), self._one_hot_offsets)


def use_host_lookups(tables: Iterable[nn.Module], output_dtype: torch.dtype) -> int:
    """Put a `HostLookup` into every FBGEMM host module of `tables` that suits; returns how many."""
    suitable = [tbe for tbe in tables if HostLookup.suits(tbe)]
    for tbe in suitable:
        tbe.forward = HostLookup(tbe, output_dtype)
    return len(suitable)
