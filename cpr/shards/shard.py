"""One table shard: which rows and columns of a table live on this worker, and live views of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cpr.extent import Extent


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False, kw_only=True)
class TableShard:
    """The rows x columns of a table that one worker owns, with the optimizer state of those rows.

    All tensors are live views: they share memory with what training reads and updates. Row `i` of each
    belongs to row id `row_offset + i` of the table.
    """

    table_fqn: str
    """Fully qualified name of the table, as in `model.state_dict()` without the trailing `.weight`."""
    table_shape: tuple[int, int]
    """Rows and columns of the whole table."""
    row_offset: int
    """Row id of the first row here."""
    col_offset: int
    """Column of the table that is the first here."""
    replicated: bool
    """Whether every rank holds an equal copy of the whole table (data-parallel)."""
    weights: Tensor
    """`[num_rows, num_cols]`, the table's dtype."""
    optimizer_state: Mapping[str, Tensor]
    """State of the rows by PyTorch's name ("sum", "exp_avg", ...): `[num_rows]` where the optimizer keeps one
    number a row, `[num_rows, num_cols]` where it keeps one an element. Empty for stateless optimizers. What
    else belongs to rows (`add_row_columns`) is here, too."""
    counters: Mapping[str, Tensor] = field(default_factory=dict)
    """Live scalars of the table's optimizer that are not per row, such as "iter"; shared by its shards."""
    updated_in_backward: bool = False
    """Whether training changes rows in the backward pass alone (see `before_updates`): a fused optimizer."""
    flush: Callable[[], None] = _nothing
    """Call before reading: brings rows that a device cache holds back into `weights`."""
    invalidate: Callable[[], None] = _nothing
    """Call after writing: makes a device cache forget rows that it holds, the optimizer heed its counters,
    and whoever added columns to the rows look at them anew. Who writes only some rows calls `flush` first, or
    newer rows in the cache are lost."""

    @property
    def num_rows(self) -> int:
        """Rows here."""
        return self.weights.shape[0]

    @property
    def num_cols(self) -> int:
        """Columns here."""
        return self.weights.shape[1]

    @property
    def extent(self) -> Extent:
        """Which rows and columns of the table these are."""
        return Extent(
            table_fqn=self.table_fqn,
            table_shape=self.table_shape,
            row_offset=self.row_offset,
            num_rows=self.num_rows,
            col_offset=self.col_offset,
            num_cols=self.num_cols,
        )

    @property
    def columns(self) -> dict[str, Tensor]:
        """Weights and optimizer state by column name: what is saved and restored together."""
        return {"weights": self.weights, **self.optimizer_state}

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row with its optimizer state."""
        return sum(bytes_per_row(tensor) for tensor in self.columns.values())

    @property
    def table_name(self) -> str:
        """The table's own name, which tables of other modules may have as well."""
        return self.table_fqn.rpartition(".")[2]

    @property
    def name(self) -> str:
        """A name that is unique among all shards of a model and fit for a path."""
        return self.extent.name

    def narrow(self, begin: int, end: int) -> "TableShard":
        """A part of this shard: live views of the rows from row id `begin` to before `end`.

        Raises:
            ValueError: it does not hold them all.
        """
        first = begin - self.row_offset
        if not 0 <= first <= end - self.row_offset <= self.num_rows:
            raise ValueError(
                f"rows {begin} to {end - 1} were asked of {self.name}, which holds rows {self.row_offset} to "
                f"{self.row_offset + self.num_rows - 1}"
            )
        here = slice(first, end - self.row_offset)
        return replace(
            self,
            row_offset=begin,
            weights=self.weights[here],
            optimizer_state={name: state[here] for name, state in self.optimizer_state.items()},
        )


def bytes_per_row(tensor: Tensor) -> int:
    """Bytes of one row of `[rows]` or `[rows, columns]`."""
    width = 1 if tensor.dim() == 1 else tensor.shape[1]
    return int(width * torch.empty(0, dtype=tensor.dtype).element_size())
