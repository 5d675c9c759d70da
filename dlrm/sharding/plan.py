"""Sharding plans from TorchRec's planner, under the constraints of the configuration.

Small tables are replicated (data_parallel), because exchanging their rows costs more than keeping them equal.
The others are sharded by the kinds that the configuration allows and the device supports.
"""

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, DataType, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from cpr.humanize import align_columns, count_text, size_text
from dlrm.config.schema import ShardingConfig, TablesConfig
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.sharding.exchange_codecs import ExchangeCodecs
from dlrm.sharding.memory import FP32_BYTES, local_world_size, memory_bytes
from dlrm.sharding.sequences import SequenceSharder
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.rows import RowSplitSharder
from dlrm.sharding.worker_speeds import SpeedPerfModel

DIM_STEP: Final = 4
"""FBGEMM reads rows in vectors of four columns: a replicated table of another dim gives zeros on CUDA
(meta-pytorch/torchrec#3673)."""
MAX_CUDA_DIM: Final = 2048
"""Columns of the widest row that FBGEMM's CUDA kernels take (`max_embedding_dim` of its code generator)."""
WHOLE: Final = ParameterConstraints(
    sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
)


def make_sharder(
    tables: TablesConfig,
    wire_dtype: torch.dtype | None = None,
    codecs: ExchangeCodecs | None = None,
) -> RowSplitSharder:
    """Make TorchRec's sharder with the tables' fused optimizer.

    `wire_dtype` is as for `RowSplitSharder`; `codecs` are for exchanged pooled embeddings and their
    gradients.
    """
    optimizer = TABLE_OPTIMIZERS[tables.optimizer]
    fused_params = {
        "optimizer": optimizer.fbgemm_type,
        "learning_rate": tables.learning_rate,
        **{name: getattr(tables, name) for name in optimizer.options},
    }
    return RowSplitSharder(fused_params, wire_dtype=wire_dtype, codecs=codecs)


def sequence_sharder(bags: EmbeddingBagCollectionSharder) -> SequenceSharder:
    """Make the sharder of tables without pooling, with the optimizer of pooled ones; rows travel in full."""
    return SequenceSharder(bags.fused_params)


def make_plan(
    model: nn.Module,
    sharder: EmbeddingBagCollectionSharder,
    config: ShardingConfig,
    device: torch.device,
    batch_size: int,
    whole: Collection[str] = (),
    speeds: Sequence[float] | None = None,
) -> ShardingPlan:
    """Plan on rank 0 and send the plan to all ranks.

    `sharder` is that of pooled tables. `batch_size` is that of one rank; the tables named in `whole` must be
    on one rank each, neither cut nor replicated. `speeds` are those of the ranks; None: all are equally fast.

    Raises:
        ValueError: the device lacks a kind, the kernels cannot take a table, or the tables do not fit into
            memory.
    """
    config.check_device(device.type)
    check_tables(model, device)
    world_size, memory = dist.get_world_size(), memory_bytes(device)
    usable = {name: int(size * (1 - config.reserved_share)) for name, size in memory.items()}
    topology = Topology(
        world_size=world_size,
        local_world_size=local_world_size(),
        compute_device=device.type,
        **usable,
    )
    planner = EmbeddingShardingPlanner(
        topology=topology,
        performance_model=None if speeds is None else SpeedPerfModel(topology, speeds),
        batch_size=batch_size,
        storage_reservation=FixedPercentageStorageReservation(0.0),  # of GPUs' memory alone: see `usable`
        constraints=_constraints(model, config, world_size) | dict.fromkeys(whole, WHOLE),
    )
    try:
        return planner.collective_plan(model, [sharder, sequence_sharder(sharder)], dist.group.WORLD)
    except PlannerError as error:
        reason, *_ = str(error).splitlines()  # a page of the planner's internals follows
        held = size_text(memory.get("hbm_cap", memory["ddr_cap"]))
        raise ValueError(
            f"the tables ({size_text(_table_bytes(model))} and their optimizer state) cannot be laid over "
            f"{count_text(world_size, 'rank')} with {held} of "
            f"memory each: {reason.strip()} Use more ranks, a smaller model.embedding_dim, a lower cap when "
            f"preparing the data, or more sharding.kinds{' or sharding.kernels' * (device.type == 'cuda')}"
        ) from error


def _constraints(
    model: nn.Module, config: ShardingConfig, world_size: int
) -> dict[str, ParameterConstraints]:
    constraints = {}
    for table in tables_of(model):
        replicated = world_size > 1 and table.num_embeddings <= config.data_parallel_rows
        kinds = [ShardingType.DATA_PARALLEL.value] if replicated else list(config.kinds)
        if table.embedding_dim < 2 * config.min_column_dim and "table_wise" in kinds:
            kinds = [kind for kind in kinds if kind != ShardingType.COLUMN_WISE.value]
        constraints[table.name] = ParameterConstraints(
            sharding_types=kinds,
            min_partition=config.min_column_dim,
            compute_kernels=None if replicated else list(config.kernels),
        )
    return constraints


def tables_of(model: nn.Module) -> Iterator[BaseEmbeddingConfig]:
    """All tables of an unsharded model."""
    for collection in model.modules():
        if isinstance(collection, EmbeddingBagCollection):
            yield from collection.embedding_bag_configs()
        elif isinstance(collection, EmbeddingCollection):
            yield from collection.embedding_configs()


def check_tables(model: nn.Module, device: torch.device) -> None:
    """Refuse tables that FBGEMM's kernels or this trainer would get wrong, some of them without a word.

    Raises:
        ValueError: names the table and says what to change.
    """
    seen: dict[str, BaseEmbeddingConfig] = {}
    for table in tables_of(model):
        if seen.setdefault(table.name, table) is not table:
            raise ValueError(
                f"two tables are called {table.name}: give each a name of its own, by which it is planned, "
                "initialized and saved"
            )
        _check_dim(table.name, table.embedding_dim, device)
        if table.data_type != DataType.FP32:
            raise ValueError(
                f"table {table.name} has data type {table.data_type.value}; the trainer's tables are FP32 "
                "(train.precision=bf16 is about what is computed from them)"
            )
    for collection in model.modules():
        if isinstance(collection, EmbeddingBagCollection) and collection.is_weighted():
            for table in collection.embedding_bag_configs():
                # FBGEMM's CPU backward leaves the mean out, and TorchRec's row-wise tables have another mean
                if table.pooling == PoolingType.MEAN:
                    raise ValueError(
                        f"table {table.name} has pooling mean and weights (is_weighted), for which gradients "
                        "are wrong: use pooling sum, and divide the weights by what you like"
                    )


def _check_dim(name: str, dim: int, device: torch.device) -> None:
    on_gpu = device.type == "cuda"
    most = MAX_CUDA_DIM if on_gpu else sys.maxsize
    if dim % DIM_STEP or not 0 < dim <= most:
        nearest = (dim + DIM_STEP // 2) // DIM_STEP * DIM_STEP
        limit = f" of at most {MAX_CUDA_DIM}" if on_gpu else ""
        raise ValueError(
            f"table {name} has dim {dim}, and FBGEMM's kernels take multiples of {DIM_STEP}{limit}; the "
            f"nearest is {min(max(nearest, DIM_STEP), most)}"
        )


def _table_bytes(model: nn.Module) -> int:
    return sum(table.num_embeddings * table.embedding_dim * FP32_BYTES for table in tables_of(model))


def bytes_per_rank(plan: ShardingPlan, world_size: int) -> list[int]:
    """Bytes of the fp32 weights of tables on each rank, without replicated tables and optimizer state."""
    held = [0] * world_size
    for module_plan in plan.plan.values():
        for sharding in module_plan.values():
            for shard in getattr(sharding.sharding_spec, "shards", ()):
                held[shard.placement.rank()] += prod(shard.shard_sizes) * FP32_BYTES
    return held


def format_plan(plan: ShardingPlan, model: nn.Module, strategies: Mapping[str, str]) -> str:
    """Format where each table lies for people, largest first; `strategies` are those of the heads, by path.

    Sizes are those of the fp32 weights on all ranks together, without optimizer state.
    """
    shapes = {table.name: (table.num_embeddings, table.embedding_dim) for table in tables_of(model)}
    sizes: dict[str, int] = {}
    cells: dict[str, tuple[str, ...]] = {}
    for path, module_plan in plan.plan.items():
        is_split = isinstance(model.get_submodule(path), Head)
        split = f", {strategies.get(path, 'split')}" if is_split else ""
        for name, sharding in module_plan.items():
            (rows, dim), kind = shapes[name], sharding.sharding_type
            ranks = sorted(set(sharding.ranks or ()))  # a rank may hold several column pieces
            where = ",".join(map(str, ranks)) if len(ranks) <= 4 else f"{len(ranks)} ranks"
            copies = len(ranks) if kind == ShardingType.DATA_PARALLEL.value else 1
            sizes[name] = copies * rows * dim * FP32_BYTES
            cells[name] = (name, f"{rows:,}", str(dim), f"{kind}{split}", where, size_text(sizes[name]))
    lines = [cells[name] for name in sorted(sizes, key=lambda name: (-sizes[name], name))]
    num_rows = sum(shapes[name][0] for name in sizes)
    counts = f"{count_text(len(sizes), 'table')}, {count_text(num_rows, 'row')}"
    summary = f"{counts}, {size_text(sum(sizes.values()))}"
    head = ("table", "rows", "dim", "kind", "ranks", "size")
    return "\n".join([*align_columns([head, *lines], left=(0, 3, 4)), summary])
