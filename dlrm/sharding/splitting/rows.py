"""Row-wise sharding of pooled tables on the CPU: partial sums of a bag's rows are added up at its sample.

TorchRec shards row-wise on GPUs only: its sharder does not offer it on the CPU, and gloo's reduce-scatter
would be slow. This sharder does, for any model with an `EmbeddingBagCollection`, and makes an ordinary
`ShardedEmbeddingBagCollection`.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torchrec.distributed.embedding_lookup import BaseEmbeddingLookup
from torchrec.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
)
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
from torchrec.distributed.sharding.rw_sharding import RwPooledEmbeddingSharding
from torchrec.distributed.types import (
    Awaitable,
    NoWait,
    ParameterSharding,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.sharding.exchange_codecs import ExchangeCodecs, exchanged_width
from dlrm.sharding.sequences import mend_pieces_without_rows
from dlrm.sharding.splitting.exchange import SplitExchange

PLANNED_WIDTH: Final = 32
"""Columns assumed for codecs before tables are known."""


class RowSplitSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """`EmbeddingBagCollectionSharder` with row-wise sharding on the CPU.

    `wire_dtype` is for the partial sums of row-wise tables on the CPU, as for `SplitExchange`; `codecs` are
    for the other tables' exchanges, made for their widths.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        wire_dtype: torch.dtype | None = None,
        codecs: ExchangeCodecs | None = None,
    ) -> None:
        # TorchRec's planner reads the registry for the bytes of a number, before widths are known
        super().__init__(fused_params, None if codecs is None else codecs.registry(PLANNED_WIDTH))
        self._wire_dtype = wire_dtype
        self.codecs: Final = codecs

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that a planner may choose from."""
        types: list[str] = super().sharding_types(compute_device_type)
        return types if ShardingType.ROW_WISE.value in types else [*types, ShardingType.ROW_WISE.value]

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> "RowSplitCollection":
        """Shard a collection: this rank's tables and pieces of tables."""
        registry = self.qcomm_codecs_registry
        if self.codecs is not None:
            registry = self.codecs.registry(exchanged_width(params))
        return RowSplitCollection(
            self._wire_dtype,
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=registry,
            module_fqn=module_fqn,
        )


class RowSplitCollection(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """A `ShardedEmbeddingBagCollection` whose row-wise tables work on the CPU."""

    def __init__(self, wire_dtype: torch.dtype | None, **options: Any) -> None:
        self._wire_dtype = wire_dtype  # set first, because the base class creates shardings
        super().__init__(**options)

    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        **options: Any,
    ) -> Any:
        """Called by TorchRec for the lookup and exchange of the tables of one sharding type."""
        kind = sharding_infos[0].param_sharding.sharding_type
        if kind == ShardingType.ROW_WISE.value and (device is None or device.type == "cpu"):
            return _RowSplit(sharding_infos, env, device, wire_dtype=self._wire_dtype)
        return super().create_embedding_bag_sharding(sharding_infos, env, device, **options)


class _RowSplit(RwPooledEmbeddingSharding):  # type: ignore[misc]
    def __init__(self, *args: Any, wire_dtype: torch.dtype | None) -> None:
        super().__init__(*args)
        self._wire_dtype = wire_dtype

    def create_lookup(self, *args: Any, **options: Any) -> BaseEmbeddingLookup[KeyedJaggedTensor, Tensor]:
        lookup = super().create_lookup(*args, **options)
        mend_pieces_without_rows(lookup)
        return lookup

    def create_output_dist(self, device: torch.device | None = None) -> "_RowSums":
        return _RowSums(SplitExchange(self._pg, self._wire_dtype))


class _RowSums(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):  # type: ignore[misc]
    def __init__(self, exchange: SplitExchange) -> None:
        super().__init__()
        self._exchange = exchange

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        if sharding_ctx.variable_batch_per_feature:
            raise ValueError(
                "tables of features with batch sizes of their own cannot be row-wise on the CPU; give all "
                "features of a KeyedJaggedTensor as many bags, or shard their tables table_wise"
            )
        return NoWait(self._exchange.sum_to_owners(local_embs, sharding_ctx.batch_size_per_rank))
