"""Additional columns of a table's rows, next to its weights and optimizer state.

Data kept by row, such as the id that a row represents at present, is added here. It becomes a column in
`TableShard.optimizer_state`: saved, moved and restored with the rest of the row, of the same moment, and in
resident memory if the table is.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from cpr.shards.groups import TableGroup
from cpr.shards.shard import TableShard

ATTRIBUTE: Final = "row_columns_of_tables"
"""Attribute of an FBGEMM module with its `RowColumns`, by the table's number in it."""


class RowColumns:
    """Additional columns of a table, or of a piece of one; see `add_row_columns`."""

    def __init__(
        self, table: TableShard, dtypes: Mapping[str, torch.dtype], written: Callable[[], object]
    ) -> None:
        self.written = written
        self.tensors: Mapping[str, Tensor] = self.allocate(table, dtypes)
        """Live, `[num_rows]` each."""
        self.watchers: list[Callable[[Tensor], object]] = []
        """Called by `note_change`."""
        self.eviction_watchers: list[Callable[[Tensor], object]] = []
        """Called by `note_eviction`."""

    def note_change(self, rows: Tensor) -> None:
        """Tell which rows the owner is about to change, int64 `[n]`; not all of them may be looked up."""
        for watch in self.watchers:
            watch(rows)

    def note_eviction(self, rows: Tensor) -> None:
        """Tell which rows, int64 `[n]`, are about to lose what they represent; `note_change` is told as well.

        Row saves hold these rows, so that what they represented is gone from the saved table, too.
        """
        for watch in self.eviction_watchers:
            watch(rows)

    def allocate(self, table: TableShard, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Allocate zeros; `cpr.resident.allocation` replaces this by resident memory."""
        num_rows, device = table.weights.shape[0], table.weights.device
        return {name: torch.zeros(num_rows, dtype=dtype, device=device) for name, dtype in dtypes.items()}


def add_row_columns(
    group: TableGroup, place: int, dtypes: Mapping[str, torch.dtype], written: Callable[[], object]
) -> RowColumns:
    """Add columns to the rows of a table, before any call of `find_shards`.

    Columns may be changed only in the forward pass of training, from a pre-hook of the FBGEMM module on,
    since the hooks of `before_updates` run before those, and `note_change` is told before each change.
    Columns in resident memory must be added while the model is built (`PartialRecovery.building`), in the
    same order each time.

    Args:
        group: the FBGEMM module, with a fused optimizer.
        place: number of the table in `group.tables`.
        dtypes: by name of the column; `[num_rows]` each.
        written: called after rows were written from outside, as in a restore, to update data derived from the
            columns.

    Returns:
        The columns, initially zeros, in its `tensors`.

    Raises:
        ValueError: the table has a column of this name.
    """
    added: dict[int, RowColumns] = row_columns(group.emb_module)
    states = group.emb_module.get_optimizer_state()
    taken = {"weights", "row", *(states[place] if states else ())}
    if clash := taken & dtypes.keys() or (dtypes.keys() if place in added else set()):
        table = group.tables[place].table_fqn
        raise ValueError(f"{table} has columns already that are called {sorted(clash)}")
    columns = RowColumns(group.tables[place], dtypes, written)
    setattr(group.emb_module, ATTRIBUTE, {**added, place: columns})
    return columns


def row_columns(emb_module: Any) -> dict[int, RowColumns]:
    """Additional columns of the tables of an FBGEMM module, by the table's number."""
    found: dict[int, RowColumns] = getattr(emb_module, ATTRIBUTE, {})
    return found
