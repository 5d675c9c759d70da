"""Sharding plans from TorchRec's planner, under the constraints of the configuration.

Small tables are replicated (data_parallel), because exchanging their rows costs more than keeping them equal.
The others are sharded by the kinds that the configuration allows and the device supports.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Final

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.types import ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from cpr.humanize import align_columns, size_text
from dlrm.config.schema import ShardingConfig, TablesConfig
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.sharding.exchange_codecs import ExchangeCodecs
from dlrm.sharding.memory import FP32_BYTES, local_world_size, memory_bytes
from dlrm.sharding.splitting.head import Head
from dlrm.sharding.splitting.rows import RowSplitSharder

WHOLE: Final = ParameterConstraints(
    sharding_types=[ShardingType.TABLE_WISE.value], compute_kernels=[EmbeddingComputeKernel.FUSED.value]
)


def make_sharder(
    tables: TablesConfig,
    device: torch.device,
    dtype: torch.dtype,
    wire_dtype: torch.dtype | None = None,
    codecs: ExchangeCodecs | None = None,
) -> RowSplitSharder:
    """Make TorchRec's sharder with the tables' fused optimizer; on CUDA, FBGEMM itself returns `dtype`.

    `wire_dtype` is as for `RowSplitSharder`; `codecs` are for exchanged pooled embeddings and their
    gradients.
    """
    optimizer = TABLE_OPTIMIZERS[tables.optimizer]
    fused_params = {
        "optimizer": optimizer.fbgemm_type,
        "learning_rate": tables.learning_rate,
        **{name: getattr(tables, name) for name in optimizer.options},
    }
    if device.type == "cuda" and dtype == torch.bfloat16:
        fused_params["output_dtype"] = SparseType.BF16
    return RowSplitSharder(fused_params, wire_dtype=wire_dtype, codecs=codecs)


def make_plan(
    model: nn.Module,
    sharder: EmbeddingBagCollectionSharder,
    config: ShardingConfig,
    device: torch.device,
    batch_size: int,
    whole: Collection[str] = (),
) -> ShardingPlan:
    """Plan on rank 0 and send the plan to all ranks.

    `batch_size` is that of one rank; the tables named in `whole` must be on one rank each, neither cut nor
    replicated.

    Raises:
        ValueError: the device lacks a kind, or the tables do not fit into memory.
    """
    config.check_device(device.type)
    world_size, memory = dist.get_world_size(), memory_bytes(device)
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            world_size=world_size,
            local_world_size=local_world_size(),
            compute_device=device.type,
            **memory,
        ),
        batch_size=batch_size,
        constraints=_constraints(model, config, world_size) | dict.fromkeys(whole, WHOLE),
    )
    try:
        return planner.collective_plan(model, [sharder], dist.group.WORLD)
    except PlannerError as error:
        reason, *_ = str(error).splitlines()  # a page of the planner's internals follows
        held = size_text(memory.get("hbm_cap", memory["ddr_cap"]))
        raise ValueError(
            f"the tables ({size_text(_table_bytes(model))} and their optimizer state) cannot be laid over "
            f"{world_size} rank{'s'[: world_size > 1]} with {held} of "
            f"memory each: {reason.strip()} Use more ranks, a smaller model.embedding_dim, a lower cap when "
            "preparing the data, or more sharding.kinds"
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
            # fused keeps rows in the device's own memory; otherwise the planner may rely on paging
            compute_kernels=None if replicated else [EmbeddingComputeKernel.FUSED.value],
        )
    return constraints


def tables_of(model: nn.Module) -> Iterator[EmbeddingBagConfig]:
    """All tables of an unsharded model."""
    for collection in model.modules():
        if isinstance(collection, EmbeddingBagCollection):
            yield from collection.embedding_bag_configs()


def _table_bytes(model: nn.Module) -> int:
    return sum(table.num_embeddings * table.embedding_dim * FP32_BYTES for table in tables_of(model))


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
    summary = f"{len(sizes)} tables, {num_rows:,} rows, {size_text(sum(sizes.values()))}"
    head = ("table", "rows", "dim", "kind", "ranks", "size")
    return "\n".join([*align_columns([head, *lines], left=(0, 3, 4)), summary])
