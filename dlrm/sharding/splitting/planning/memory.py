"""Bytes of tables on each rank, to refuse a split that would overfill one.

TorchRec's planner checks only its own plan.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torchrec.distributed.types import ParameterSharding, ShardingType

from cpr.humanize import size_text
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.sharding.memory import FP32_BYTES
from dlrm.sharding.pooled import PooledFeatures
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.planning.shapes import numbers_outside_tables


def piece_bytes(rows: int, columns: int, optimizer: str) -> int:
    """Bytes of a table or a piece, fp32, with its optimizer state."""
    shapes = [shape(rows, columns) for shape in TABLE_OPTIMIZERS[optimizer].state.values()]
    return FP32_BYTES * (rows * columns + sum(map(prod, shapes)))


def table_bytes(
    head: PooledFeatures, plan: Mapping[str, ParameterSharding], num_ranks: int, optimizer: str
) -> list[int]:
    """Bytes of a head's tables on each rank under a plan."""
    held = [0] * num_ranks
    for table in head.tables.embedding_bag_configs():
        rows, columns = table.num_embeddings, table.embedding_dim
        if plan[table.name].sharding_type == ShardingType.DATA_PARALLEL.value:
            gradients = FP32_BYTES * rows * columns  # dense gradients of all rows; sharded tables have none
            held = [each + piece_bytes(rows, columns, optimizer) + gradients for each in held]
            continue
        for piece in plan[table.name].sharding_spec.shards:
            held[piece.placement.rank()] += piece_bytes(piece.shard_sizes[0], piece.shard_sizes[1], optimizer)
    return held


def operator_bytes(
    head: Head, plan: Mapping[str, ParameterSharding], num_ranks: int, optimizer: str
) -> list[int]:
    """Bytes on each rank of the weights that a split head keeps in tables: as many next to each table."""
    held = [0] * num_ranks
    if head.has_weights:
        numbers = numbers_outside_tables(head) - head.traffic().replicated
        for sharding in plan.values():
            for piece in sharding.sharding_spec.shards:
                held[piece.placement.rank()] += piece_bytes(1, -(-numbers // len(plan)), optimizer)
    return held


def too_large(
    split: Mapping[str, Sequence[int]], ordinary: Mapping[str, Sequence[int]], memory_bytes: int
) -> dict[str, str]:
    """Heads whose split does not fit into `memory_bytes` on each rank, and why.

    `split` and `ordinary` are bytes on each rank by head path, the latter of all heads. While a rank has too
    much, the head that has most there goes back to the ordinary plan.
    """
    refused: dict[str, str] = {}
    while left := split.keys() - refused.keys():
        held = {path: split[path] if path in left else ordinary[path] for path in ordinary}
        totals = [sum(of_rank) for of_rank in zip(*held.values(), strict=True)]
        rank = max(range(len(totals)), key=totals.__getitem__)
        if totals[rank] <= memory_bytes:
            break
        largest = max(sorted(left), key=lambda path: split[path][rank])
        refused[largest] = (
            f"rank {rank} would need {size_text(totals[rank])} of {size_text(memory_bytes)} for tables"
        )
    return refused
