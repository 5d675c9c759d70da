"""Where tables of a split head may lie, and a plan that puts them there: tables in balance, pieces evenly."""

from collections.abc import Mapping, Sequence
from typing import Final

from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingType

from dlrm.config.schema import COLUMN_STEP
from dlrm.sharding.splitting.head import Head, SplitBy

SHARDING_TYPES: Final[dict[SplitBy, str]] = {
    "tables": ShardingType.TABLE_WISE.value,
    "columns": ShardingType.COLUMN_WISE.value,
    "rows": ShardingType.ROW_WISE.value,
}


def sharding_types(head: Head | type[Head]) -> list[str]:
    """TorchRec's names of the ways in which a head can be split, the best first."""
    return [SHARDING_TYPES[way] for way in (head.split_by, *head.also_by)]


def columns_by_rank(head: Head, plan: Mapping[str, ParameterSharding], world_size: int) -> list[int]:
    """Number of columns that each rank has of every table of a split head, of those that it has at all.

    Raises:
        ValueError: a split head cannot have its tables where `plan` puts them.
    """
    name, allowed = type(head).__name__, sharding_types(head)
    tables = [table.name for table in head.tables.embedding_bag_configs()]
    kinds = {plan[table].sharding_type if table in plan else "missing" for table in tables}
    if len(kinds) > 1 or not kinds <= set(allowed):
        raise ValueError(
            f"a {name} can be split with its tables all {' or all '.join(allowed)}, not "
            f"{' and '.join(sorted(kinds))}; or plan its `tables` instead of the {name} itself"
        )
    layouts = [_pieces(plan[table]) for table in tables]
    if kinds == {SHARDING_TYPES["columns"]}:
        _check_columns(name, layouts)
    columns = [0] * world_size
    for pieces in layouts:
        for rank, _, width in pieces:
            columns[rank] = max(columns[rank], width)
    return columns


def _pieces(sharding: ParameterSharding) -> list[tuple[int, int, int]]:
    """Rank, first column and number of columns of each piece of a table, in the order of columns."""
    shards = sorted(sharding.sharding_spec.shards, key=lambda shard: shard.shard_offsets[1])
    return [(shard.placement.rank(), shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards]


def _check_columns(name: str, layouts: Sequence[list[tuple[int, int, int]]]) -> None:
    pieces = layouts[0]
    ranks, widths = [rank for rank, *_ in pieces], [width for *_, width in pieces]
    in_steps = all(width > 0 and width % COLUMN_STEP == 0 for width in widths)
    if ranks == sorted(set(ranks)) and in_steps and all(each == pieces for each in layouts):
        return
    found = {", ".join(f"{width} on rank {rank}" for rank, _, width in each) for each in layouts}
    raise ValueError(
        f"a {name} is split by columns: every rank has the same columns of all tables, in one piece, in the "
        f"order of ranks, and a multiple of {COLUMN_STEP} of them (an FBGEMM limit), not "
        f"{'; '.join(sorted(found))}. Give columns to fewer ranks, or plan its `tables` instead"
    )


def neighbour_of_dense(owners: Sequence[int]) -> int:
    """Index of the field next to which the dense vector is kept: on the rank that owns the fewest fields."""
    return min(range(len(owners)), key=lambda place: (owners.count(owners[place]), -owners[place]))


def even_columns(dim: int, num_ranks: int) -> list[int]:
    """Columns of each rank, the first ranks having more; 0 for the last ones if there are too few."""
    steps, more = divmod(dim // COLUMN_STEP, num_ranks)
    return [COLUMN_STEP * (steps + (rank < more)) for rank in range(num_ranks)]


def balanced(num_bytes: Sequence[float], lookups: Sequence[float], num_ranks: int) -> list[int]:
    """A rank for each table, so that all ranks have about as many bytes and lookups; the largest table first.

    Each rank gets at least one table if there are enough.
    """
    all_bytes, all_lookups = sum(num_bytes), sum(lookups) or 1.0  # all bags may be empty
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
