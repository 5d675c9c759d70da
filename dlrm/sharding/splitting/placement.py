"""Where the tables of a split head go: whole tables in balance, columns and rows as even as can be."""

from collections.abc import Sequence

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan

from dlrm.config.schema import COLUMN_STEP
from dlrm.sharding.splitting.head import Head, SplitBy


def even_columns(dim: int, num_ranks: int) -> list[int]:
    """Columns of each rank, the first ones having more; 0 for the last ones where there are too few."""
    steps, more = divmod(dim // COLUMN_STEP, num_ranks)
    return [COLUMN_STEP * (steps + (rank < more)) for rank in range(num_ranks)]


def balanced(num_bytes: Sequence[float], lookups: Sequence[float], num_ranks: int) -> list[int]:
    """A rank for each table, so that all have about as many bytes and lookups; the largest table first.

    Args:
        num_bytes: of each table.
        lookups: ids a sample of each table.
        num_ranks: that share the tables; each gets one at least, if there are as many.
    """
    all_bytes, all_lookups = sum(num_bytes), sum(lookups)
    loads = [a / all_bytes + b / all_lookups for a, b in zip(num_bytes, lookups, strict=True)]
    taken, ranks = [0.0] * num_ranks, [0] * len(loads)
    for table in sorted(range(len(loads)), key=lambda each: -loads[each]):
        rank = min(range(num_ranks), key=lambda each: taken[each])
        taken[rank] += loads[table]
        ranks[table] = rank
    return ranks


def ranks_of_tables(head: Head, ids: Sequence[float], num_ranks: int) -> list[int]:
    """As `balanced`, for the tables of a head.

    Args:
        head: its tables on any device.
        ids: that a sample has for each feature, on average.
        num_ranks: that share them.
    """
    tables = head.tables.embedding_bag_configs()
    return balanced([table.num_embeddings * table.embedding_dim for table in tables], ids, num_ranks)


def split_plan(
    head: Head,
    split_by: SplitBy,
    ids: Sequence[float],
    sharder: EmbeddingBagCollectionSharder,
    ranks: tuple[int, int],
    device_type: str,
) -> EmbeddingModuleShardingPlan:
    """The plan of the tables of a head that is split.

    Args:
        head: unsharded.
        split_by: what is dealt out.
        ids: that a sample has for each feature, on average.
        sharder: of the tables.
        ranks: how many in all, and on one node.
        device_type: "cpu" or "cuda".
    """
    num_ranks, per_node = ranks
    tables = head.tables.embedding_bag_configs()
    if split_by == "tables":
        owners = ranks_of_tables(head, ids, num_ranks)
        ways = [table_wise(rank=rank, compute_kernel="fused") for rank in owners]
    elif split_by == "columns":
        pieces = even_columns(tables[0].embedding_dim, num_ranks)
        ways = [column_wise(list(range(num_ranks)), pieces, compute_kernel="fused")] * len(tables)
    else:
        ways = [row_wise(compute_kernel="fused")] * len(tables)
    return construct_module_sharding_plan(
        head.tables,
        {table.name: way for table, way in zip(tables, ways, strict=True)},
        sharder,
        local_size=per_node,
        world_size=num_ranks,
        device_type=device_type,
    )
