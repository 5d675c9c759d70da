"""Places the tables of a split head: whole tables in balance, columns and rows as evenly as possible."""

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
    """Columns of each rank, the first ranks having more; 0 for the last ones if there are too few."""
    steps, more = divmod(dim // COLUMN_STEP, num_ranks)
    return [COLUMN_STEP * (steps + (rank < more)) for rank in range(num_ranks)]


def balanced(num_bytes: Sequence[float], lookups: Sequence[float], num_ranks: int) -> list[int]:
    """A rank for each table, so that all ranks have about as many bytes and lookups; the largest table first.

    Each rank gets at least one table if there are enough.
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
    """A rank for each table of a head, by `balanced`; `ids` is the mean number per sample of each feature."""
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
    """Plan the tables of a split head.

    `ids` is the mean number per sample of each feature, `ranks` the number of ranks in all and on one node.
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
