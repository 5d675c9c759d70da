"""From a model to the table shards of this rank."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.optim import Optimizer

from cpr.shards.groups import TableGroup, table_groups
from cpr.shards.matching import match_state
from cpr.shards.shard import TableShard


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
    return sorted(shards, key=lambda shard: (shard.table_fqn, shard.row_offset, shard.col_offset))


def _shards(group: TableGroup, optimizers: Sequence[Optimizer]) -> Iterator[TableShard]:
    fused = not isinstance(group.emb_module, DenseTableBatchedEmbeddingBagsCodegen)
    states = _fused_states(group.emb_module) if fused else []
    shared: dict[str, Any] = _fused_extras(group.emb_module) if fused else {}
    for place, table in enumerate(group.tables):
        if table.weights.numel() == 0:
            continue
        if fused:
            rows: Mapping[str, Tensor] = states[place] if states else {}
            extras = shared
        else:
            rows, counters = match_state(table.fqn, table.weights, optimizers)
            extras = {"counters": counters}
        yield TableShard(
            table_fqn=table.fqn,
            table_shape=table.shape,
            row_offset=table.row_offset,
            col_offset=table.col_offset,
            replicated=table.replicated,
            weights=table.weights,
            optimizer_state=rows,
            **extras,
        )


def _fused_states(tbe: Any) -> list[dict[str, Tensor]]:
    """State of each table's rows by PyTorch's name; an empty list for stateless optimizers."""
    return [
        {name: state.detach() for name, state in states.items() if name != "iter"}
        for states in tbe.get_optimizer_state()
    ]


def _fused_extras(tbe: Any) -> dict[str, Any]:
    """What the tables of a fused module share: counters, and the hooks around reading and writing."""
    counters = {"iter": tbe.iter[0], "learning_rate": tbe.learning_rate_tensor}
    if tbe._used_rowwise_adagrad_with_counter:
        counters["max_counter"] = tbe.max_counter[0]
    flush: Callable[[], None] = tbe.flush
    return {"counters": counters, "flush": flush, "invalidate": partial(_invalidate, tbe)}


def _invalidate(tbe: Any) -> None:
    tbe.reset_cache_states()
    # FBGEMM computes with a copy of `iter` on the host, which it brings up to date once only
    tbe.iter_cpu.fill_(tbe.iter[0].item())
