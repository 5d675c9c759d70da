"""Discovery of a model's tensors on this rank: table shards, and dense tensors, which all ranks replicate."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.shards.groups import TableGroup, table_groups, tables_prefix, walk
from cpr.shards.matching import match_state
from cpr.shards.row_columns import RowColumns, row_columns
from cpr.shards.shard import TableShard
from cpr.shards.updates import UPDATED_IN_FORWARD


def find_shards(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> list[TableShard]:
    """All table shards of `model` on this rank, sorted by table, row and column.

    The state of a fused optimizer is in the table's FBGEMM module. The state of other tables, such as
    data-parallel ones, is found in `optimizers`, at the parameter that shares memory with the table: the
    table itself, or a flat or tall view over several. It is looked up at each read, as `load_state_dict`
    replaces it. Optimizers that create their state in the first step have none before (see `create_state`). A
    table without optimizer has no state.

    The views stay valid while the model keeps its tables, also when their storage moves to shared memory
    (`share_memory_`). After a `reshard`, or `to` another device, call this again.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it. Pieces without
            rows are left out.
        optimizers: ordinary optimizers that update tables; others are ignored.

    Raises:
        ValueError: the model holds tables in an unsupported way.
    """
    shards = [shard for group in table_groups(model) for shard in _shards(group, optimizers)]
    return sorted((shard for shard in shards if shard.num_rows), key=lambda shard: shard.extent)


def dense_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Live parameters and persistent buffers outside of sharded tables, by their name in `state_dict()`.

    The tensors share memory with the model and can be written without `no_grad`. A tensor with several names
    in one module appears under each.

    Args:
        model: a `DistributedModelParallel`, or any module.
    """
    found: dict[str, Tensor] = {}
    inside: tuple[str, ...] = ()
    for path, module in walk(model):
        prefix = tables_prefix(module)
        if prefix is not None:
            inside += (f"{path}{prefix}.",)
        if path.startswith(inside):
            continue
        hidden = module._non_persistent_buffers_set
        persistent = {name: buffer for name, buffer in module._buffers.items() if name not in hidden}
        for name, tensor in (module._parameters | persistent).items():
            if tensor is not None:
                found[f"{path}{name}"] = tensor.detach()
    return found


def _shards(group: TableGroup, optimizers: Sequence[Optimizer]) -> Iterator[TableShard]:
    if not isinstance(group.emb_module, DenseTableBatchedEmbeddingBagsCodegen):
        yield from _fused_shards(group)
        return
    for table in group.tables:
        state, counters = match_state(table.table_fqn, table.weights, optimizers)
        yield replace(table, optimizer_state=state, counters=counters)


def _fused_shards(group: TableGroup) -> Iterator[TableShard]:
    tbe = group.emb_module
    counters = {"iter": tbe.iter[0], "learning_rate": tbe.learning_rate_tensor}
    if tbe._used_rowwise_adagrad_with_counter:
        counters["max_counter"] = tbe.max_counter[0]
    # empty for stateless optimizers; some optimizers list `iter` among the states of rows
    states = tbe.get_optimizer_state() or [{}] * len(group.tables)
    added = row_columns(tbe)
    for place, (table, by_name) in enumerate(zip(group.tables, states, strict=True)):
        state = {name: tensor.detach() for name, tensor in by_name.items() if name != "iter"}
        more = added.get(place)
        yield replace(
            table,
            optimizer_state=state if more is None else {**state, **more.tensors},
            counters=counters,
            updated_in_backward=tbe.optimizer not in UPDATED_IN_FORWARD and more is None,
            flush=tbe.flush,
            invalidate=partial(_invalidate, tbe, more),
        )


def _invalidate(tbe: Any, more: RowColumns | None) -> None:
    tbe.reset_cache_states()
    # FBGEMM uses a copy of `iter` on the host, which it updates only once
    tbe.iter_cpu.fill_(tbe.iter[0].item())
    if more is not None:
        more.written()
