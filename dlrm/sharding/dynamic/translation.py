"""Translates ids into rows between TorchRec's exchange of inputs and FBGEMM's lookup.

This happens on the rank that has the table, which sees all its ids of a step in an order that depends on the
batch alone. Hooks of the FBGEMM module (`cpr.shards.lookups`) and replacements of its `forward` see rows. Ids
without a row are removed from their bags: they add nothing to the sum and learn nothing. On a GPU, the ids
of all tables of a module are read in one transfer, and the host waits for nothing else.
"""

from collections.abc import Mapping
from typing import Any, Final

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    PoolingMode,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor, nn
from torchrec.distributed.types import ShardingType

from cpr.shards import TableGroup, add_row_columns, table_groups
from cpr.shards.groups import tables_prefix, walk
from cpr.shards.lookups import LookupLayout, feature_ends
from dlrm.config.table_optimizers import TABLE_OPTIMIZERS
from dlrm.sharding.dynamic.columns import sent
from dlrm.sharding.dynamic.table import DynamicTable, columns_of_rows

ARGUMENTS: Final = ("indices", "offsets", "per_sample_weights")
"""Positional arguments of an FBGEMM module's `forward`."""
OPTIMIZERS: Final = tuple(each.fbgemm_type for each in TABLE_OPTIMIZERS.values() if each.suits_dynamic)
"""Optimizers whose state of a new row is 0, and that leave unread rows alone."""


def make_dynamic(model: nn.Module, admit_after: Mapping[str, int], seed: int) -> list[DynamicTable]:
    """Make tables of a sharded model dynamic, so that their ids may be any 64-bit integers.

    Call it on all ranks, once, before the tables' shards are listed, and with resident tables while the model
    is built (`PartialRecovery.building`). Weights stay as they are until rows get ids. The backward pass of a
    batch must precede the next forward pass, which may assign rows to other ids.

    Args:
        model: a `DistributedModelParallel`, or any module with sharded collections in it.
        admit_after: by table name, the number of sightings in training after which an id gets a row.
        seed: of the rows' initial values.

    Returns:
        The dynamic tables on this rank.

    Raises:
        ValueError: there is no such table, or it cannot be dynamic; says what to change.
    """
    _check_tables(model, admit_after)
    made: list[DynamicTable] = []
    for group in table_groups(model):
        names = [table.table_name for table in group.tables]
        chosen = {place: name for place, name in enumerate(names) if name in admit_after}
        if chosen:
            _check_module(group, next(iter(chosen.values())))
            tables = {
                place: _make_table(group, place, admit_after[name], seed) for place, name in chosen.items()
            }
            group.emb_module.register_forward_pre_hook(_Translation(group, tables), with_kwargs=True)
            made += tables.values()
    return made


def _make_table(group: TableGroup, place: int, admit_after: int, seed: int) -> DynamicTable:
    def written() -> None:
        table.invalidate_index()

    columns = add_row_columns(group, place, columns_of_rows(admit_after), written)
    states = group.emb_module.get_optimizer_state()
    table = DynamicTable(
        group.tables[place].table_name,
        group.tables[place].weights,
        [state.detach() for state in states[place].values()] if states else [],
        columns.tensors,
        admit_after=admit_after,
        seed=seed,
        initial_range=group.initial_ranges[place],
        changes=columns.note_change,
        evictions=columns.note_eviction,
    )
    return table


class _Translation:
    """Pre-hook of an FBGEMM module that replaces ids of dynamic tables (by position) by rows."""

    def __init__(self, group: TableGroup, tables: Mapping[int, DynamicTable]) -> None:
        self._layout = LookupLayout.of(group)
        self._tables = [
            (table, [feature for feature, of in enumerate(self._layout.feature_tables) if of == place])
            for place, table in tables.items()
        ]

    def __call__(
        self, tbe: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]]:
        given = dict(zip(ARGUMENTS, args, strict=False)) | named
        trains = tbe.training and torch.is_grad_enabled()
        with torch.no_grad():
            return (), given | self._translated(given, trains)

    def _translated(self, given: Mapping[str, Any], trains: bool) -> dict[str, Tensor]:
        """The arguments that change."""
        offsets: Tensor = given["offsets"]
        rows, ends = _read(given["indices"], feature_ends(self._layout, given))
        has_row = torch.ones_like(rows, dtype=torch.bool)
        for table, features in self._tables:
            spans = [slice(ends[feature], ends[feature + 1]) for feature in features]
            ids = torch.cat([rows[span] for span in spans])
            found = table.train_on(ids) if trains else table.find(ids)
            for span in spans:
                num = span.stop - span.start
                rows[span], found = found[:num], found[num:]
                has_row[span] = rows[span] >= 0
        device = offsets.device
        if bool(has_row.all()):
            return {"indices": sent(rows, device)}
        kept = has_row.nonzero().squeeze(1)
        before = torch.zeros(rows.numel() + 1, dtype=offsets.dtype)
        torch.cumsum(has_row, 0, out=before[1:])
        changed = {
            "indices": sent(rows[kept], device),
            "offsets": sent(before, device)[offsets.to(torch.int64)],
        }
        if given.get("per_sample_weights") is not None:
            changed["per_sample_weights"] = given["per_sample_weights"][sent(kept, device)]
        return changed


def _read(ids: Tensor, ends: Tensor) -> tuple[Tensor, list[int]]:
    """Ids, as int64 that may be overwritten, and ends of features, on the host; waits for a GPU once."""
    both = torch.cat([ids.to(torch.int64), ends.to(torch.int64)]).cpu()
    return both[: ids.numel()], both[ids.numel() :].tolist()


def _check_tables(model: nn.Module, admit_after: Mapping[str, int]) -> None:
    """Check the plan, which is the same on all ranks, so that all raise alike."""
    known: set[str] = set()
    for _, module in walk(model):
        if tables_prefix(module) is None:
            continue
        plan: Any = module.module_sharding_plan
        for name, sharding in plan.items():
            if name in admit_after and sharding.sharding_type != ShardingType.TABLE_WISE.value:
                raise ValueError(
                    f"the dynamic table {name} is planned {sharding.sharding_type}: rows get their ids where "
                    "the whole table is. Plan it table_wise"
                )
        known |= plan.keys()
    if unknown := sorted(admit_after.keys() - known):
        raise ValueError(
            f"there is no table {unknown[0]} to be dynamic; there are {', '.join(sorted(known))}"
        )
    if wrong := [name for name, times in admit_after.items() if times < 1]:
        raise ValueError(
            f"ids of {wrong[0]} are to get a row after {admit_after[wrong[0]]} sightings; 1: at once"
        )


def _check_module(group: TableGroup, name: str) -> None:
    """Check optimizer, pooling and memory of a module, which are the same on all ranks."""
    tbe = group.emb_module
    if not isinstance(tbe, SplitTableBatchedEmbeddingBagsCodegen) or tbe.optimizer not in OPTIMIZERS:
        known = ", ".join(optimizer.name for optimizer in OPTIMIZERS)
        raise ValueError(f"the dynamic table {name} needs the compute kernel fused and one of {known}")
    if tbe.pooling_mode != PoolingMode.SUM:
        raise ValueError(
            f"the dynamic table {name} has pooling {tbe.pooling_mode.name}; only sums are supported: make it "
            "one of an EmbeddingBagCollection with pooling SUM, or leave its feature out of tables.dynamic"
        )
    if any(spec[2] not in (EmbeddingLocation.HOST, EmbeddingLocation.DEVICE) for spec in tbe.embedding_specs):
        raise ValueError(
            f"the dynamic table {name} lies behind a cache of FBGEMM; use the compute kernel fused"
        )
