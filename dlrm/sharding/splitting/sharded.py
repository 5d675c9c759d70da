"""Heads as TorchRec sharded modules: their own sharder, for `DistributedModelParallel`."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    EmbeddingBagCollectionSharder,
)
from torchrec.distributed.types import (
    Awaitable,
    LazyAwaitable,
    LazyNoWait,
    ModuleSharder,
    ParameterSharding,
    ShardedModule,
    ShardingEnv,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from dlrm.sharding.splitting.exchange import Exchange
from dlrm.sharding.splitting.head import Head, Owned


@dataclass
class HeadContext(Multistreamable):
    """Of one forward pass."""

    tables: EmbeddingBagCollectionContext
    dense: tuple[Tensor, ...] = field(default_factory=tuple)

    def record_stream(self, stream: torch.Stream) -> None:
        """As TorchRec's pipelines ask for."""
        self.tables.record_stream(stream)
        for tensor in self.dense:
            tensor.record_stream(stream)


class ShardedHead(ShardedModule[KJTList, Tensor, Tensor, HeadContext]):  # type: ignore[type-var]
    """A head of which every rank has a part.

    Its tables are a `ShardedEmbeddingBagCollection` under the name that they have in the head, so that fused
    optimizers, `state_dict` and whatever else knows of tables find them. Only their output is not exchanged.

    Args:
        head: unsharded, its tables on the meta device.
        plan: of its tables, all of one sharding type.
        env: the ranks.
        device: of this rank.
        sharder: of the tables.
        wire_dtype: as for `Exchange`.
    """

    def __init__(
        self,
        head: Head,
        plan: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        sharder: EmbeddingBagCollectionSharder,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kinds = {each.sharding_type for each in plan.values()}
        if len(kinds) > 1:
            raise ValueError(f"the tables of a head are split alike, not by {', '.join(sorted(kinds))}")
        self.tables = sharder.shard(head.tables, plan, env, device)
        for name, child in head.named_children():
            if name != "tables":
                self.add_module(name, child)
        self.dtype = head.dtype
        # its modules are this one's, under the same names
        object.__setattr__(self, "_head", head)
        self._exchange = Exchange(env.process_group, wire_dtype)
        (sharding,) = self.tables._embedding_shardings
        self._names: list[str] = sharding.embedding_names_per_rank()[env.rank]
        self._columns = _columns_by_rank(plan, env.world_size)

    def create_context(self) -> HeadContext:
        """Of a forward pass."""
        return HeadContext(self.tables.create_context())

    def input_dist(
        self, ctx: HeadContext, sparse: KeyedJaggedTensor, *dense: Tensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Every rank gets all ids of all samples that it looks up."""
        ctx.dense = dense
        return self.tables.input_dist(ctx.tables, sparse)

    def compute(self, ctx: HeadContext, dist_input: KJTList) -> Tensor:
        """Pooled embeddings `[B, width]` of all ranks' samples, from the tables, or parts, that are here."""
        (pooled,) = self.tables.compute(ctx.tables, dist_input)
        return pooled.to(self.dtype)

    def output_dist(self, ctx: HeadContext, output: Tensor) -> LazyAwaitable[Tensor]:
        """The operator's result for this rank's samples."""
        (context,) = ctx.tables.sharding_contexts
        sizes = context.batch_size_per_rank if context else [output.shape[0]]
        owned = Owned(values=output, names=self._names, batch_sizes=sizes, columns=self._columns)
        return LazyNoWait(self._head.split(owned, *ctx.dense, exchange=self._exchange))

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """All: no parameter of a head is replicated."""
        for name, _ in self.named_parameters(prefix):
            yield name

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """What it was."""
        return type(self._head)


def _columns_by_rank(plan: dict[str, ParameterSharding], world_size: int) -> list[int]:
    """How many columns of each of its tables a rank has."""
    columns = [0] * world_size
    for sharding in plan.values():
        of_table = [0] * world_size
        for piece in sharding.sharding_spec.shards:
            if not piece.shard_offsets[0]:  # pieces of rows beside each other have the same columns
                of_table[piece.placement.rank()] += piece.shard_sizes[1]
        columns = list(map(max, columns, of_table))
    return columns


class HeadSharder(ModuleSharder[Head]):
    """Shards heads of one type, which is how `DistributedModelParallel` finds a module's sharder.

    Args:
        kind: of the heads.
        tables: shards their tables.
        wire_dtype: as for `Exchange`.
    """

    def __init__(
        self,
        kind: type[Head],
        tables: EmbeddingBagCollectionSharder,
        wire_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self._kind, self._tables, self._wire_dtype = kind, tables, wire_dtype

    def shard(
        self,
        module: Head,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHead:
        """This rank's part of a head."""
        assert device is not None
        return ShardedHead(module, params, env, device, self._tables, self._wire_dtype)

    def shardable_parameters(self, module: Head) -> dict[str, nn.Parameter]:
        """Its tables, by name."""
        return self._tables.shardable_parameters(module.tables)

    @property
    def module_type(self) -> type[Head]:
        """What it shards."""
        return self._kind
