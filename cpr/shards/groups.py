"""Traversal of a TorchRec model down to the FBGEMM modules that hold its tables.

TorchRec's sharded collections hide their lookups from `modules()`, and wrap those of data-parallel tables
in a `DistributedDataParallel`. All knowledge of this structure and of the names of tables is here.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_types import ShardedEmbeddingTable
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.distributed.model_parallel import (
    DistributedModelParallel,
    DMPCollection,
    get_unwrapped_module,
)
from torchrec.distributed.types import ShardingType

from cpr.shards.shard import TableShard

COLLECTIONS: Final[dict[type[nn.Module], str]] = {
    ShardedEmbeddingBagCollection: "embedding_bags",
    ShardedEmbeddingCollection: "embeddings",
}
"""Modules that hold tables, with the prefix of tables in their `state_dict`."""


@dataclass(frozen=True, eq=False, kw_only=True)
class TableGroup:
    """One FBGEMM module (a "table batched embedding") with its tables."""

    emb_module: Any
    tables: tuple[TableShard, ...]
    """In the order of `emb_module.split_embedding_weights()`, without optimizer state (see `find_shards`)."""
    initial_ranges: tuple[tuple[float, float], ...]
    """Lowest and highest initial value of each table, by `weight_init_min` and `weight_init_max` of its
    TorchRec config (default +-1 / sqrt(rows))."""


class Hooks(ExitStack):
    """Hooks in a model (`enter_context`), removed by `remove` or at the end of a `with` block."""

    remove = ExitStack.close


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules of a model with their path in `model.state_dict()`, each module once."""
    return _walk(model, "", set())


def _walk(module: nn.Module, path: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, DMPCollection):
        raise ValueError(
            "DMPCollection (2D parallel) keeps a copy of each table per group of ranks, which is not "
            "supported; use DistributedModelParallel"
        )
    if isinstance(module, DistributedModelParallel):
        module = get_unwrapped_module(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        yield from _walk(child, f"{path}{name}.", seen)


def tables_prefix(module: nn.Module) -> str | None:
    """Prefix of tables in the `state_dict` of a sharded collection; None for other modules."""
    return next((prefix for kind, prefix in COLLECTIONS.items() if isinstance(module, kind)), None)


def table_groups(model: nn.Module) -> Iterator[TableGroup]:
    """All FBGEMM modules of a model on this rank.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it.

    Raises:
        ValueError: the model holds tables in an unsupported way.
    """
    for path, module in walk(model):
        if isinstance(module, ShardedManagedCollisionCollection):
            raise ValueError(
                f"{path.removesuffix('.')} remaps ids (managed collisions), whose state differs by rank and "
                "cannot be saved yet; use an EmbeddingBagCollection without it"
            )
        prefix = tables_prefix(module)
        if prefix is not None:
            for kernel in _kernels(module):
                yield _group(f"{path}{prefix}.", module.module_sharding_plan, kernel)


def _kernels(collection: Any) -> Iterator[Any]:
    for lookup in collection._lookups:
        yield from getattr(lookup, "module", lookup)._emb_modules  # .module: of a DistributedDataParallel


def _group(prefix: str, plan: Any, kernel: Any) -> TableGroup:
    configs, tbe = kernel.config.embedding_tables, kernel.emb_module
    if not isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen | DenseTableBatchedEmbeddingBagsCodegen):
        raise ValueError(
            f"{prefix}{configs[0].name} lives in a {type(tbe).__name__}, which cannot be saved; choose the "
            "compute kernel fused, fused_uvm, fused_uvm_caching or dense"
        )
    placed = [
        _placed(f"{prefix}{table.name}", table, plan[table.name].sharding_type, rows)
        for table, rows in zip(configs, tbe.split_embedding_weights(), strict=True)
    ]
    ranges = [(table.get_weight_init_min(), table.get_weight_init_max()) for table in configs]
    return TableGroup(emb_module=tbe, tables=tuple(placed), initial_ranges=tuple(ranges))


def _placed(fqn: str, table: ShardedEmbeddingTable, kind: str, weights: Tensor) -> TableShard:
    metadata = table.local_metadata  # None: the whole table
    row_offset, col_offset = metadata.shard_offsets if metadata else (0, 0)
    return TableShard(
        table_fqn=fqn,
        table_shape=(table.num_embeddings, table.embedding_dim),
        row_offset=row_offset,
        col_offset=col_offset,
        replicated=kind == ShardingType.DATA_PARALLEL.value,
        weights=weights.detach(),
        optimizer_state={},
    )
