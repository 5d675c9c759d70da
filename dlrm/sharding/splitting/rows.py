"""Pooled bags split by rows inside a table, on the CPU too: partial sums of a bag's rows meet at its sample.

TorchRec shards row-wise on GPUs only. Its input exchange and lookups work on any device, but its sharder does
not offer them on the CPU, and gloo's reduce-scatter, which it would end in, is slow. This one does, for any
model with an `EmbeddingBagCollection`; what comes out is a `ShardedEmbeddingBagCollection` as ever.
"""

from typing import Any

import torch
from torch import Tensor
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
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm.sharding.splitting.exchange import Exchange


class RowSplitSharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """`EmbeddingBagCollectionSharder`, with row-wise sharding on the CPU.

    Args:
        fused_params: as there: optimizer, learning rate and the like.
        qcomm_codecs_registry: as there; row-wise tables on the CPU go without.
        wire_dtype: of the partial sums of row-wise tables on the CPU, as for `Exchange`.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, QuantizedCommCodecs] | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._wire_dtype = wire_dtype

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """What a planner may choose from."""
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
        """This rank's tables and pieces of tables."""
        return RowSplitCollection(
            self._wire_dtype,
            module=module,
            table_name_to_parameter_sharding=params,
            env=env,
            fused_params=self.fused_params,
            device=device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )


class RowSplitCollection(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """A `ShardedEmbeddingBagCollection` whose row-wise tables work on the CPU.

    Args:
        wire_dtype: as for `Exchange`.
        options: of `ShardedEmbeddingBagCollection`.
    """

    def __init__(self, wire_dtype: torch.dtype | None, **options: Any) -> None:
        self._wire_dtype = wire_dtype  # before the rest, which asks for shardings
        super().__init__(**options)

    def create_embedding_bag_sharding(
        self,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        **options: Any,
    ) -> Any:
        """How the tables of one sharding type are looked up and exchanged; TorchRec asks for it."""
        kind = sharding_infos[0].param_sharding.sharding_type
        if kind == ShardingType.ROW_WISE.value and (device is None or device.type == "cpu"):
            return _RowSplit(sharding_infos, env, device, wire_dtype=self._wire_dtype)
        return super().create_embedding_bag_sharding(sharding_infos, env, device, **options)


class _RowSplit(RwPooledEmbeddingSharding):  # type: ignore[misc]
    def __init__(self, *args: Any, wire_dtype: torch.dtype | None) -> None:
        super().__init__(*args)
        self._wire_dtype = wire_dtype

    def create_output_dist(self, device: torch.device | None = None) -> "_RowSums":
        return _RowSums(Exchange(self._pg, self._wire_dtype))


class _RowSums(BaseEmbeddingDist[EmbeddingShardingContext, Tensor, Tensor]):  # type: ignore[misc]
    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def forward(self, local_embs: Tensor, sharding_ctx: EmbeddingShardingContext) -> Awaitable[Tensor]:
        if sharding_ctx.variable_batch_per_feature:
            raise ValueError(
                "tables of features with batch sizes of their own cannot be row-wise on the CPU; give all "
                "features of a KeyedJaggedTensor as many bags, or shard their tables table_wise"
            )
        return NoWait(self._exchange.sum_to_owners(local_embs, sharding_ctx.batch_size_per_rank))
