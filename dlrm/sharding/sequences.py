"""Sharding of tables without pooling (`EmbeddingCollection`), also row-wise and replicated on the CPU.

TorchRec's own module fails on the CPU where a rank's pieces of row-wise tables have no rows. Where
tables are replicated, FBGEMM's lookup pools their rows without a word.
"""

from functools import partial
from itertools import accumulate
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor
from torch.nn.functional import embedding
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_lookup import BaseEmbeddingLookup
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.sharding.dp_sequence_sharding import DpSequenceEmbeddingSharding
from torchrec.distributed.sharding.rw_sequence_sharding import RwSequenceEmbeddingSharding
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection


class SequenceSharder(EmbeddingCollectionSharder):  # type: ignore[misc]
    """`EmbeddingCollectionSharder` whose row-wise and data-parallel tables work on the CPU."""

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> "SequenceCollection":
        """Shard a collection: this rank's tables and pieces of tables."""
        return SequenceCollection(module, params, env, self.fused_params, device, module_fqn=module_fqn)


class SequenceCollection(ShardedEmbeddingCollection):  # type: ignore[misc]
    """A `ShardedEmbeddingCollection` whose row-wise and data-parallel tables work on the CPU."""

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        **options: Any,
    ) -> Any:
        """Called by TorchRec for the lookup and exchange of the tables of one sharding type."""
        kinds = {ShardingType.ROW_WISE.value: _RowWise, ShardingType.DATA_PARALLEL.value: _Replicated}
        if sharding_type in kinds and (device is None or device.type == "cpu"):
            return kinds[sharding_type](sharding_infos, env, device)
        return super().create_embedding_sharding(sharding_type, sharding_infos, env, device, **options)


class _RowWise(RwSequenceEmbeddingSharding):  # type: ignore[misc]
    def create_lookup(self, *args: Any, **options: Any) -> BaseEmbeddingLookup[Any, Tensor]:
        lookup = super().create_lookup(*args, **options)
        mend_pieces_without_rows(lookup)
        return lookup


class _Replicated(DpSequenceEmbeddingSharding):  # type: ignore[misc]
    def create_lookup(self, *args: Any, **options: Any) -> BaseEmbeddingLookup[Any, Tensor]:
        lookup = super().create_lookup(*args, **options)
        for kernel in lookup._emb_modules:
            tbe = kernel.emb_module
            if isinstance(tbe, DenseTableBatchedEmbeddingBagsCodegen):
                tbe.forward = partial(_look_up_rows, tbe)
        return lookup


def _look_up_rows(
    tbe: DenseTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Rows `[N, dim]` of ids `[N]`, which `offsets` `[F * B + 1]` divide into bags, feature-major."""
    first_rows = tbe.hash_size_cumsum[:-1]
    num_bags = offsets.numel() - 1
    ends = offsets[:: max(num_bags // first_rows.numel(), 1)]
    rows = indices + first_rows.repeat_interleave(ends.diff()[: first_rows.numel()])
    return embedding(rows, tbe.weights.view(-1, tbe.max_D))


def mend_pieces_without_rows(lookup: BaseEmbeddingLookup[Any, Tensor]) -> None:
    """Let the row-wise tables of a lookup on the CPU have pieces without rows."""
    for kernel in lookup._emb_modules:
        tbe = kernel.emb_module
        if isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen):
            _separate_empty_pieces(tbe)
            if not tbe.weights_host.numel():
                tbe.forward = partial(_look_nothing_up, tbe)


def _separate_empty_pieces(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    """Count pieces without rows as one row in the offsets by which FBGEMM's CPU backward separates tables.

    Where two features start at the same offset, FBGEMM takes them for one table's and looks for that table's
    end beyond the last, which for an empty last piece is past the end of the offsets. No rows are read from
    them.
    """
    rows = [max(spec[0], 1) for spec in tbe.embedding_specs]
    starts = [0, *accumulate(rows)]
    offsets = [*(starts[table] for table in tbe.feature_table_map), starts[-1]]
    tbe.hash_size_cumsum.copy_(torch.tensor(offsets))


def _look_nothing_up(
    tbe: SplitTableBatchedEmbeddingBagsCodegen, indices: Tensor, offsets: Tensor, *_: Any, **__: Any
) -> Tensor:
    """Replaces FBGEMM's lookup, which takes a module without host rows for one of a GPU.

    The result requires a gradient, so that this rank joins the backward collectives of the others.
    """
    dtype = SparseType.from_int(tbe.output_dtype).as_dtype()
    if tbe.pooling_mode == PoolingMode.NONE:
        return torch.zeros(0, tbe.max_D, dtype=dtype, requires_grad=True)
    batch = (offsets.numel() - 1) // len(tbe.feature_table_map)
    return torch.zeros(batch, tbe.total_D, dtype=dtype, requires_grad=True)
