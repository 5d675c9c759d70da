"""Choice of the prioritised tables, by rules with the same result on all ranks."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import ShardingType

from cpr.shards.groups import tables_prefix, walk


def table_sizes(model: nn.Module) -> dict[str, int]:
    """Number of rows of each table of a model by `table_fqn`, including tables without rows on this rank."""
    return {fqn: num_rows for fqn, num_rows, _ in _tables(model)}


def fused_tables(model: nn.Module) -> frozenset[str]:
    """Names (`table_fqn`) of the tables with a fused optimizer, which changes only looked-up rows.

    An ordinary optimizer, of data-parallel tables and of the compute kernel `dense`, steps over the whole
    table: with momentum or weight decay it changes every row.
    """
    return frozenset(fqn for fqn, _, is_fused in _tables(model) if is_fused)


def largest_tables(sizes: Mapping[str, int], covering: float) -> frozenset[str]:
    """The largest tables that together hold at least the share `covering` of all rows.

    Args:
        sizes: rows of each table; ties go to the first name.
        covering: 0 to 1.

    >>> sorted(largest_tables({"users": 900, "items": 95, "days": 5}, 0.99))
    ['items', 'users']
    """
    wanted = covering * sum(sizes.values())
    chosen, held = set(), 0
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        if held >= wanted:
            break
        chosen.add(name)
        held += sizes[name]
    return frozenset(chosen)


def _tables(model: nn.Module) -> Iterator[tuple[str, int, bool]]:
    """Fully qualified name of each table, its rows, and whether its optimizer is fused."""
    for path, module in walk(model):
        prefix = tables_prefix(module)
        if prefix is not None:
            collection: Any = module
            for name, table in collection._table_name_to_config.items():
                placed = collection.module_sharding_plan[name]
                is_copied = placed.sharding_type == ShardingType.DATA_PARALLEL.value
                is_fused = not is_copied and placed.compute_kernel != EmbeddingComputeKernel.DENSE.value
                yield f"{path}{prefix}.{name}", int(table.num_embeddings), is_fused
