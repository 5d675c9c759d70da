"""The model of a run before and after its tables are sharded over the ranks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from cpr.shards import table_groups
from cpr.shards.groups import tables_prefix, walk
from data.dataset import Feature
from dlrm.comm.row_sparse import send_touched_rows
from dlrm.config.schema import TablesConfig
from dlrm.models.build import build_model
from dlrm.models.check import check_model
from dlrm.optim.build import arithmetic_dtype
from dlrm.pipeline.tick_tock import add_second_replica
from dlrm.sharding.bounds import IdBounds
from dlrm.sharding.dynamic import make_dynamic
from dlrm.sharding.exchange_codecs import ExchangeCodecs
from dlrm.sharding.host_lookup import use_host_lookups
from dlrm.sharding.plan import make_plan, make_sharder, sequence_sharder, tables_of
from dlrm.sharding.pooled import PooledFeatures
from dlrm.sharding.splitting.planning.shapes import heads_of
from dlrm.sharding.splitting.planning.torchrec_plan import WIRE_DTYPES, Planned
from dlrm.sharding.splitting.rows import RowSplitSharder
from dlrm.sharding.splitting.sharded import ShardedHead
from dlrm.sharding.tables import initialize_tables, uninitialized_tables
from dlrm.training.data import Inputs


@dataclass(frozen=True, kw_only=True)
class Unsharded:
    """A model whose tables are on the meta device, and TorchRec's plan for them."""

    model: nn.Module
    sharder: RowSplitSharder
    plan: ShardingPlan
    dynamic: Sequence[str]
    """Names of the dynamic tables."""


def features_of(inputs: Inputs) -> list[Feature]:
    """Features of the data; those with dynamic tables get `tables.dynamic_rows` rows."""
    return with_dynamic_rows(inputs.config.tables, inputs.manifest.features)


def with_dynamic_rows(tables: TablesConfig, features: Sequence[Feature]) -> list[Feature]:
    """The features; those with dynamic tables get `tables.dynamic_rows` rows."""
    return [
        replace(feature, rows=tables.dynamic_rows) if tables.is_dynamic(feature.name) else feature
        for feature in features
    ]


def check_own_model(inputs: Inputs) -> None:
    """Try a model of the user on the first samples, before it is sharded; built-in models pass.

    Raises:
        ValueError: says what to change in its class, or that it does not give the metric to compare.
    """
    config, manifest = inputs.config, inputs.manifest
    if config.model.is_own and inputs.first is not None:
        features, dtype = features_of(inputs), arithmetic_dtype(config.train.precision)
        dynamic = [feature.name for feature in features if config.tables.is_dynamic(feature.name)]
        gives = check_model(config.model, features, manifest.dense, dtype, inputs.first, dynamic)
        if config.train.goal is not None:
            config.train.goal.check(*gives)


def unsharded(
    inputs: Inputs, features: Sequence[Feature] = (), speeds: Sequence[float] | None = None
) -> Unsharded:
    """Build the unsharded model and TorchRec's plan; a collective with the same result on all ranks.

    `features` replace those of the data if given; their rows are the sizes of the tables. `speeds` are those
    of the ranks; None: all are equally fast.
    """
    config, device = inputs.config, inputs.device
    dtype, batch_size = arithmetic_dtype(config.train.precision), inputs.loader.config.batch_size
    seed_generators(config.train.seed)  # equal dense parameters on all ranks without a broadcast
    model = build_model(config.model, features or features_of(inputs), inputs.manifest.dense, dtype)
    if config.train.has_two_replicas:
        add_second_replica(model)
    is_dynamic = config.tables.is_dynamic
    dynamic = [table.name for table in tables_of(model) if any(map(is_dynamic, table.feature_names))]
    exchanged = config.sharding.exchange_dtype
    codecs = None if exchanged == "fp32" else ExchangeCodecs(dtype=exchanged, batch_size=batch_size)
    sharder = make_sharder(config.tables, WIRE_DTYPES[config.sharding.wire_dtype], codecs)
    plan = make_plan(model, sharder, config.sharding, device, batch_size, dynamic, speeds)
    return Unsharded(model=model, sharder=sharder, plan=plan, dynamic=dynamic)


def seed_generators(seed: int) -> None:
    """Seed the generators of PyTorch, NumPy and Python, any of which a class of the user may draw from."""
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)
    random.seed(seed)


def apply_plan(
    before: Unsharded, planned: Planned, inputs: Inputs, initialize: bool
) -> DistributedModelParallel:
    """Shard the model as planned; a collective.

    Tables have the initial values of the seed if `initialize`, else whatever their memory holds.
    """
    config = inputs.config
    bounds = IdBounds(table for table in tables_of(before.model) if table.name not in before.dynamic)
    move_dense(before.model, inputs.device)
    if inputs.device.type == "cuda":
        set_output_dtypes(before.model, planned.plan)
    with uninitialized_tables():
        sharded = DistributedModelParallel(
            before.model,
            device=inputs.device,
            plan=planned.plan,
            sharders=[*planned.sharders, sequence_sharder(before.sharder)],
            init_data_parallel=False,  # no DDP: `dense_sync` averages dense gradients
        )
    bounds.watch(sharded)
    _ignore_unasked_weights(sharded)
    if config.sharding.data_parallel_gradients == "rows":
        _average_touched_rows(sharded)
    make_dynamic(sharded, dict.fromkeys(before.dynamic, config.tables.admit_after), config.train.seed)
    if initialize:
        initialize_tables(sharded, config.train.seed)
    for module in sharded.modules():
        if isinstance(module, PooledFeatures | ShardedHead):  # heads may differ in dtype
            use_host_lookups([group.emb_module for group in table_groups(module)], module.dtype)
            _match_dtype_without_tables(module.tables, module.dtype)
    use_host_lookups(_tables_outside_heads(sharded), torch.float32)
    return sharded


def set_output_dtypes(model: nn.Module, plan: ShardingPlan) -> None:
    """Let FBGEMM's CUDA kernels return each head's embeddings in its dtype, as the host lookup does.

    Tables outside of heads return fp32.
    """
    for path, head in heads_of(model).items():
        if head.dtype == torch.bfloat16:
            for sharding in (plan.plan.get(path) or plan.plan[f"{path}.tables"]).values():
                sharding.output_dtype = DataType.BF16


def _ignore_unasked_weights(model: nn.Module) -> None:
    """Let collections without `is_weighted` ignore the weights of ids, as they do before they are sharded."""

    def drop_weights(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        sparse, *others = arguments
        if sparse.weights_or_none() is None:
            return None
        without = KeyedJaggedTensor(
            keys=sparse.keys(), values=sparse.values(), lengths=sparse.lengths(), stride=sparse.stride()
        )
        return without, *others

    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection) and not module._is_weighted:
            module.register_forward_pre_hook(drop_weights)


def _tables_outside_heads(model: nn.Module) -> list[nn.Module]:
    """The FBGEMM modules of collections that a model has made for itself; they return fp32."""
    heads = [module for module in model.modules() if isinstance(module, PooledFeatures | ShardedHead)]
    of_heads = {id(group.emb_module) for head in heads for group in table_groups(head)}
    return [group.emb_module for group in table_groups(model) if id(group.emb_module) not in of_heads]


def _match_dtype_without_tables(collection: Any, dtype: torch.dtype) -> None:
    """Set the output dtype of a rank without tables of a sharding kind to that of the other ranks.

    TorchRec's default there is fp32, and this rank computes from it how many bytes it will receive.
    """
    for lookup in collection._lookups:
        if not getattr(lookup, "module", lookup)._emb_modules:
            device = lookup._dummy_embs_tensor.device
            lookup._dummy_embs_tensor = torch.empty(0, dtype=dtype, device=device, requires_grad=True)


def move_dense(model: nn.Module, device: torch.device) -> None:
    """Move everything but tables to a device, in place; tables stay on the meta device until sharded."""
    for each in (*model.parameters(), *model.buffers()):
        if not each.is_meta:
            each.data = each.data.to(device)


def _average_touched_rows(model: nn.Module) -> None:
    """Let replicated fp32 tables send only the rows that samples touched; before the first backward pass."""
    for _, module in walk(model):
        if tables_prefix(module) is None:
            continue
        lookups: Any = module._lookups
        for lookup in lookups:
            if isinstance(lookup, DistributedDataParallel):
                tables = [kernel.emb_module for kernel in lookup.module._emb_modules]
                send_touched_rows(lookup, {each.weights: each.embedding_specs for each in tables})
