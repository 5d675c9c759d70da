"""More columns of a table's rows: what belongs to a row besides its weights and its optimizer's state.

Whoever keeps something by row beside a table, such as the id that a row stands for at the moment, adds it
here. It then is one more column of the row in `TableShard.optimizer_state`: saved, moved and restored with
the rest of the row and from the same moment, and in memory that outlives the worker wherever the table is.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from cpr.shards.groups import TableGroup
from cpr.shards.shard import TableShard

ATTRIBUTE: Final = "row_columns_of_tables"
"""Of an FBGEMM module: its `RowColumns`, by the place of their table in it."""


class RowColumns:
    """Columns beside a table, or a piece of one.

    Args:
        table: whose rows they belong to.
        dtypes: of the columns, by name.
        written: called after rows were written from outside, as when they are restored.
    """

    def __init__(
        self, table: TableShard, dtypes: Mapping[str, torch.dtype], written: Callable[[], object]
    ) -> None:
        self.written = written
        self.tensors: Mapping[str, Tensor] = self.allocate(table, dtypes)
        """Live, `[num_rows]` each."""

    def allocate(self, table: TableShard, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
        """Their memory, of zeros; `cpr.resident.allocation` gives another, maybe that of a dead worker."""
        num_rows, device = table.weights.shape[0], table.weights.device
        return {name: torch.zeros(num_rows, dtype=dtype, device=device) for name, dtype in dtypes.items()}


def add_row_columns(
    group: TableGroup, place: int, dtypes: Mapping[str, torch.dtype], written: Callable[[], object]
) -> Mapping[str, Tensor]:
    """Give the rows of a table more columns; before anything looks for its shards (`find_shards`).

    Whoever changes them does so in the forward pass of training and after its own pre-hooks of the FBGEMM
    module began: those of `before_updates` come first. To outlive the worker they are to be added while the
    model is built (`PartialRecovery.building`), in the same order each time.

    Args:
        group: the FBGEMM module, with a fused optimizer.
        place: of the table among `group.tables`.
        dtypes: by name of the column; `[num_rows]` each, zeros in the beginning.
        written: called after rows were written from outside, such as when they were restored: whatever was
            derived from the columns is to be derived anew.

    Returns:
        The columns by name, live.

    Raises:
        ValueError: the table has a column of such a name.
    """
    added: dict[int, RowColumns] = row_columns(group.emb_module)
    states = group.emb_module.get_optimizer_state()
    taken = {"weights", "row", *(states[place] if states else ())}
    if clash := taken & dtypes.keys() or (dtypes.keys() if place in added else set()):
        table = group.tables[place].table_fqn
        raise ValueError(f"{table} has columns already that are called {sorted(clash)}")
    columns = RowColumns(group.tables[place], dtypes, written)
    setattr(group.emb_module, ATTRIBUTE, {**added, place: columns})
    return columns.tensors


def row_columns(emb_module: Any) -> dict[int, RowColumns]:
    """What was added to the tables of an FBGEMM module, by the table's place."""
    found: dict[int, RowColumns] = getattr(emb_module, ATTRIBUTE, {})
    return found
