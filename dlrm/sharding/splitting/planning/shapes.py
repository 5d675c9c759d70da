"""A model's heads as the planner sees them: their shapes, and the memory of their tables on each rank."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.types import ParameterSharding, ShardingPlan, ShardingType

from cpr.humanize import size_text
from dlrm.config.schema import COLUMN_STEP, DenseConfig
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.sharding.exchange_codecs import exchanged_width
from dlrm.sharding.memory import FP32_BYTES
from dlrm.sharding.parameters import dense_parameters
from dlrm.sharding.pooled import PooledFeatures
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.layout import even_columns, neighbour_of_dense, ranks_of_tables
from dlrm.sharding.splitting.operator_tables import make_operator_sharder
from dlrm.sharding.splitting.planning.strategies import HeadShape
from dlrm.sharding.splitting.rows import RowSplitSharder

ONE_RANK: Final = "there is one rank"
"""Reason why nothing is split on one rank."""
DEVICE_SHARES: Final = {"fused_uvm": 0.0, "fused_uvm_caching": UVM_CACHING_RATIO}
"""Share of a table in a GPU's memory, by compute kernel; 1 for all others."""


@dataclass(frozen=True, kw_only=True)
class PlanSetting:
    """Number of ranks, ids, dense optimizer and device, on which shapes depend besides the model."""

    num_ranks: int
    ids: Mapping[str, float]
    """Mean number of ids per sample by feature; 1 for features that are missing."""
    dense: DenseConfig
    device: torch.device


def heads_of(model: nn.Module) -> dict[str, PooledFeatures]:
    """Heads, and other tables with an operator over them, by path in the unsharded model."""
    return {path: module for path, module in model.named_modules() if isinstance(module, PooledFeatures)}


def ids_of(head: PooledFeatures, ids: Mapping[str, float]) -> list[float]:
    """Mean number of ids per sample of each feature of a head."""
    return [ids.get(name, 1.0) for name in head.names]


def numbers_outside_tables(module: nn.Module) -> int:
    """Count the weights of a head outside its tables: those of the operator over the pooled embeddings."""
    return sum(each.numel() for each in dense_parameters(module))


def shapes_of(
    model: nn.Module, ordinary: ShardingPlan, sharder: EmbeddingBagCollectionSharder, setting: PlanSetting
) -> list[HeadShape]:
    """Shapes of all heads of an unsharded model, given TorchRec's plan and the sharder of its tables."""
    output_dtype = (sharder.fused_params or {}).get("output_dtype")
    shapes = []
    for path, head in heads_of(model).items():
        plan = ordinary.plan[f"{path}.tables"]
        shape = _ordinary(path, head, plan, setting)
        if output_dtype is not None:  # FBGEMM itself rounds, whatever the head's dtype
            shape = replace(shape, value_bytes=output_dtype.as_dtype().itemsize)
        if isinstance(sharder, RowSplitSharder) and sharder.codecs is not None:
            shape = replace(shape, exchanged_bytes=sharder.codecs.value_bytes(exchanged_width(plan)))
        shapes.append(_with_split(shape, head, setting))
    return shapes


def _ordinary(
    path: str, head: PooledFeatures, plan: Mapping[str, ParameterSharding], setting: PlanSetting
) -> HeadShape:
    widths, bags, looked_up = ([0.0] * setting.num_ranks for _ in range(3))
    replicated = 0
    ids = ids_of(head, setting.ids)
    configs = head.tables.embedding_bag_configs()
    for table, of_sample in zip(configs, ids, strict=True):
        if plan[table.name].sharding_type == ShardingType.DATA_PARALLEL.value:
            replicated += table.num_embeddings * table.embedding_dim
            continue
        for piece in plan[table.name].sharding_spec.shards:
            rank = piece.placement.rank()
            widths[rank] += piece.shard_sizes[1]
            bags[rank] += 1
            looked_up[rank] += of_sample * piece.shard_sizes[0] / table.num_embeddings
    return HeadShape(
        path=path,
        num_tables=len(configs),
        dim=configs[0].embedding_dim,
        value_bytes=head.dtype.itemsize,
        ids=sum(ids),
        is_weighted=head.tables.is_weighted(),
        widths=tuple(map(int, widths)),
        bags=tuple(bags),
        looked_up=tuple(looked_up),
        replicated=replicated,
        weights=numbers_outside_tables(head),
    )


def _with_split(shape: HeadShape, head: PooledFeatures, setting: PlanSetting) -> HeadShape:
    if not isinstance(head, Head):
        return shape
    num_ranks, ids = setting.num_ranks, ids_of(head, setting.ids)
    if head.split_by == "columns":
        columns = even_columns(shape.dim, num_ranks)
        bags = [float(shape.num_tables)] * num_ranks
        looked_up = [sum(ids)] * num_ranks
    else:
        owners = ranks_of_tables(head, ids, num_ranks)
        columns, bags, looked_up = [0] * num_ranks, [0.0] * num_ranks, [0.0] * num_ranks
        columns[owners[neighbour_of_dense(owners)]] = shape.dim
        for rank, of_sample in zip(owners, ids, strict=True):
            bags[rank] += 1
            looked_up[rank] += of_sample
    return replace(
        shape,
        traffic=head.traffic(),
        split_bags=tuple(bags),
        split_ids=tuple(looked_up),
        columns=tuple(columns),
        partial_rows="rows" in (head.split_by, *head.also_by),
        refusal=_refusal(head, shape.dim, setting),
    )


def _refusal(head: Head, dim: int, setting: PlanSetting) -> str:
    """Why a head cannot be split here; empty if it can."""
    if head.split_by == "columns" and dim // COLUMN_STEP < setting.num_ranks:
        return (
            f"{dim} columns make {dim // COLUMN_STEP} pieces of {COLUMN_STEP} (an FBGEMM limit), too few for "
            f"{setting.num_ranks} ranks"
        )
    if head.has_weights:
        try:
            make_operator_sharder(setting.dense, setting.device)
        except ValueError as error:
            return str(error)
    return ONE_RANK if setting.num_ranks == 1 else ""


def piece_bytes(rows: int, columns: int, optimizer: str) -> int:
    """Bytes of a table or a piece, fp32, with its optimizer state."""
    shapes = [shape(rows, columns) for shape in TABLE_OPTIMIZERS[optimizer].state.values()]
    return FP32_BYTES * (rows * columns + sum(map(prod, shapes)))


def table_bytes(
    head: PooledFeatures, plan: Mapping[str, ParameterSharding], num_ranks: int, optimizer: str
) -> list[int]:
    """Bytes of a head's tables on each rank under a plan, in the device's own memory."""
    held = [0] * num_ranks
    for table in head.tables.embedding_bag_configs():
        rows, columns = table.num_embeddings, table.embedding_dim
        if plan[table.name].sharding_type == ShardingType.DATA_PARALLEL.value:
            gradients = FP32_BYTES * rows * columns  # dense gradients of all rows; sharded tables have none
            held = [each + piece_bytes(rows, columns, optimizer) + gradients for each in held]
            continue
        share = DEVICE_SHARES.get(str(plan[table.name].compute_kernel), 1.0)
        for piece in plan[table.name].sharding_spec.shards:
            held_bytes = piece_bytes(piece.shard_sizes[0], piece.shard_sizes[1], optimizer)
            held[piece.placement.rank()] += int(share * held_bytes)
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
