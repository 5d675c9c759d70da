"""From a model to the table shards of this rank."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.optim import Optimizer

from cpr.shards.columns import RowColumns, row_columns
from cpr.shards.groups import TableGroup, table_groups
from cpr.shards.matching import match_state
from cpr.shards.shard import TableShard
from cpr.shards.updates import UPDATED_IN_FORWARD


def find_shards(model: nn.Module, optimizers: Sequence[Optimizer] = ()) -> list[TableShard]:
    """All table shards of `model` on this rank, sorted by table, row and column.

    Tables with a fused optimizer bring their state along. Others, such as data-parallel ones, get it from
    `optimizers`: from the parameter that shares memory with the table, whether that parameter is the table,
    or a flat or tall view over several. Such state is looked up whenever it is read, so that it is right
    also after `load_state_dict` has replaced it; an optimizer that creates its state in its first step
    gives none before that (`create_state` makes it create it, to be overwritten by a load). A table that
    no optimizer updates has no state.

    The views stay valid while the model keeps its tables, also when their storage moves to shared memory
    (`share_memory_`). After a `reshard`, or `to` another device, call this again.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it. Pieces without
            rows are left out.
        optimizers: ordinary optimizers that update tables; others among them do no harm.

    Raises:
        ValueError: the model holds tables in a way that is not supported; the message says which.
    """
    shards = [shard for group in table_groups(model) for shard in _shards(group, optimizers)]
    return sorted(
        (shard for shard in shards if shard.num_rows),
        key=lambda shard: shard.extent,
    )


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
    # FBGEMM computes with a copy of `iter` on the host, which it brings up to date once only
    tbe.iter_cpu.fill_(tbe.iter[0].item())
    if more is not None:
        more.written()
