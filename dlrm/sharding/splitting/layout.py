"""Rules for where the tables of a split head may lie, and the columns that follow for each rank."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from torchrec.distributed.types import ParameterSharding, ShardingType

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
    kinds = {each.sharding_type for each in plan.values()}
    allowed = sharding_types(head)
    name = type(head).__name__
    missing = {table.name for table in head.tables.embedding_bag_configs()} - plan.keys()
    if missing:
        raise ValueError(
            f"the plan of a {name} lacks its tables {', '.join(sorted(missing))}; name all of them"
        )
    if len(kinds) > 1:
        raise ValueError(
            f"the tables of a {name} that is split lie all alike, not {' and '.join(sorted(kinds))}: "
            f"shard all {allowed[0]}, or plan its `tables` instead of the {name} itself"
        )
    if not kinds <= set(allowed):
        raise ValueError(
            f"a {name} can be split with its tables {' or '.join(allowed)}, not {''.join(kinds)}; "
            f"or plan its `tables` instead of the {name} itself"
        )
    layouts = {table: _pieces(sharding) for table, sharding in plan.items()}
    if kinds == {SHARDING_TYPES["columns"]}:
        _check_columns(name, layouts)
    columns = [0] * world_size
    for pieces in layouts.values():
        for rank, _, width in pieces:
            columns[rank] = max(columns[rank], width)
    return columns


def _pieces(sharding: ParameterSharding) -> list[tuple[int, int, int]]:
    """Rank, first column and number of columns of each piece of a table, in the order of columns."""
    shards = sorted(sharding.sharding_spec.shards, key=lambda shard: shard.shard_offsets[1])
    return [(shard.placement.rank(), shard.shard_offsets[1], shard.shard_sizes[1]) for shard in shards]


def _check_columns(name: str, layouts: Mapping[str, list[tuple[int, int, int]]]) -> None:
    first, *others = layouts
    for table in others:
        if layouts[table] != layouts[first]:
            raise ValueError(
                f"a {name} is split by columns, so that every rank has the same columns of all its tables; "
                f"{first} has {_described(layouts[first])}, but {table} has {_described(layouts[table])}"
            )
    pieces = layouts[first]
    ranks = [rank for rank, _, _ in pieces]
    if ranks != sorted(set(ranks)):
        raise ValueError(
            f"the columns of a {name} lie in the order of ranks, one piece each, "
            f"not as {_described(pieces)}; put the ranks in order"
        )
    dim = sum(width for _, _, width in pieces)
    if any(width <= 0 or width % COLUMN_STEP for _, _, width in pieces):
        raise ValueError(
            f"the {dim} columns of a {name} cannot be split as {_described(pieces)}: every piece needs a "
            f"multiple of {COLUMN_STEP} (an FBGEMM limit), so that {dim} columns split over at most "
            f"{dim // COLUMN_STEP} ranks; give columns to fewer ranks, or plan its `tables` instead"
        )


def _described(pieces: Iterable[tuple[int, int, int]]) -> str:
    return ", ".join(f"{width} on rank {rank}" for rank, _, width in pieces)


def neighbour_of_dense(owners: Sequence[int]) -> int:
    """Index of the field next to which the dense vector is kept: on the rank that owns the fewest fields."""
    return min(range(len(owners)), key=lambda place: (owners.count(owners[place]), -owners[place]))
