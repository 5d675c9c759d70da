"""Heads as TorchRec sharded modules, and their sharder for `DistributedModelParallel`."""

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

from dlrm.sharding.splitting.exchange import SplitExchange
from dlrm.sharding.splitting.head import Head, Owned
from dlrm.sharding.splitting.layout import columns_by_rank, sharding_types
from dlrm.sharding.splitting.operator_tables import Placement
from dlrm.sharding.splitting.two_level import TwoLevelExchange


@dataclass
class HeadContext(Multistreamable):  # type: ignore[misc]
    """State of one forward pass."""

    tables: EmbeddingBagCollectionContext
    dense: tuple[Tensor, ...] = field(default_factory=tuple)

    @property
    def sharding_contexts(self) -> list[Any]:
        """Where TorchRec's input exchange stores batch sizes, which its pipelines send ahead."""
        contexts: list[Any] = self.tables.sharding_contexts
        return contexts

    def record_stream(self, stream: torch.Stream) -> None:
        """Called by TorchRec's pipelines."""
        self.tables.record_stream(stream)
        for tensor in self.dense:
            tensor.record_stream(stream)


class ShardedHead(ShardedModule[KJTList, Tensor, Tensor, HeadContext]):  # type: ignore[misc]
    """A head of which every rank has a part.

    Its tables are a `ShardedEmbeddingBagCollection` under their usual name, so that fused optimizers and
    `state_dict` find them; only their output is not exchanged. The tables in `plan` all have one sharding
    type. `operators` shards weights in tables (`make_operator_sharder`); with more than one of
    `ranks_per_node`, sums are made inside nodes first (`TwoLevelExchange`).
    """

    def __init__(
        self,
        head: Head,
        plan: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        sharder: EmbeddingBagCollectionSharder,
        wire_dtype: torch.dtype | None = None,
        operators: EmbeddingBagCollectionSharder | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        super().__init__()
        self._columns = columns_by_rank(head, plan, env.world_size)
        self.tables = sharder.shard(head.tables, plan, env, device)
        (sharding,) = self.tables._embedding_shardings
        self._names: list[str] = sharding.embedding_names_per_rank()[env.rank]
        if head.split_by == "tables":
            tables = zip(head.names, head.tables.embedding_bag_configs(), strict=True)
            fields = {name: plan[table.name] for name, table in tables}
            head.co_locate(
                Placement(fields=fields, names=self._names, sharder=operators, env=env, device=device)
            )
        for name, child in head.named_children():
            if name != "tables":
                self.add_module(name, child)
        self.dtype = head.dtype
        # not a submodule: its children are this module's, and would be listed twice
        object.__setattr__(self, "_head", head)
        self._exchange = (
            TwoLevelExchange(env.process_group, ranks_per_node, wire_dtype)
            if ranks_per_node > 1
            else SplitExchange(env.process_group, wire_dtype)
        )

    def create_context(self) -> HeadContext:
        """Make the context of a forward pass."""
        return HeadContext(self.tables.create_context())

    def input_dist(
        self, ctx: HeadContext, sparse: KeyedJaggedTensor, *dense: Tensor
    ) -> Awaitable[Awaitable[KJTList]]:
        """Send every rank the ids, of all samples, that it looks up.

        Raises:
            ValueError: features have different numbers of bags.
        """
        if sparse.variable_stride_per_key():
            raise ValueError(
                "split heads have as many bags of every feature; expand the KeyedJaggedTensor, or plan the "
                "`tables` of the head instead of the head itself"
            )
        ctx.dense = dense
        return self.tables.input_dist(ctx.tables, sparse)

    def compute(self, ctx: HeadContext, dist_input: KJTList) -> Tensor:
        """Look up pooled embeddings `[B, width]` of all ranks' samples in this rank's tables."""
        (pooled,) = self.tables.compute(ctx.tables, dist_input)
        values: Tensor = pooled.to(self.dtype)
        if not self._names:  # TorchRec's placeholder output has no samples, but carries the gradient
            (context,) = ctx.tables.sharding_contexts
            values = values.reshape(sum(context.batch_size_per_rank), 0)
        return values

    def output_dist(self, ctx: HeadContext, output: Tensor) -> LazyAwaitable[Tensor]:
        """Compute the operator for this rank's samples."""
        (context,) = ctx.tables.sharding_contexts
        sizes = context.batch_size_per_rank if context else [output.shape[0]]
        owned = Owned(values=output, names=self._names, batch_sizes=sizes, columns=self._columns)
        return LazyNoWait(self._head.split(owned, *ctx.dense, exchange=self._exchange))

    def compute_and_output_dist(self, ctx: HeadContext, input: KJTList) -> Any:
        """Return a tensor, because the model's own functions do not take an awaitable."""
        return self.output_dist(ctx, self.compute(ctx, input)).wait()

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of the tables; all other parameters are replicated."""
        for name, _ in self.named_parameters(prefix):
            if ".embedding_bags." in name:
                yield name

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Type of the unsharded head."""
        return type(self._head)


class HeadSharder(ModuleSharder[Head]):  # type: ignore[misc]
    """Shards heads of one type with the options of `ShardedHead`.

    `DistributedModelParallel` finds a module's sharder by the module's type.
    """

    def __init__(
        self,
        kind: type[Head],
        tables: EmbeddingBagCollectionSharder,
        wire_dtype: torch.dtype | None = None,
        operators: EmbeddingBagCollectionSharder | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        super().__init__()
        self._kind, self._tables = kind, tables
        self._options = (wire_dtype, operators, ranks_per_node)

    def shard(
        self,
        module: Head,
        params: Any,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedHead:
        """Make this rank's part of a head."""
        assert device is not None
        return ShardedHead(module, params, env, device, self._tables, *self._options)

    def shardable_parameters(self, module: Head) -> dict[str, nn.Parameter]:
        """Tables by name."""
        parameters: dict[str, nn.Parameter] = self._tables.shardable_parameters(module.tables)
        return parameters

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that suit both the operator and the tables, the best first."""
        of_tables = self._tables.sharding_types(compute_device_type)
        return [each for each in sharding_types(self._kind) if each in of_tables]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Compute kernels of the tables."""
        kernels: list[str] = self._tables.compute_kernels(sharding_type, compute_device_type)
        return kernels

    def storage_usage(self, tensor: Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table, by kind of memory."""
        usage: dict[str, int] = self._tables.storage_usage(tensor, compute_device_type, compute_kernel)
        return usage

    @property
    def module_type(self) -> type[Head]:
        """Type of the heads."""
        return self._kind
