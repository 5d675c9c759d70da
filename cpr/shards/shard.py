"""A table shard: rows and columns of a table on this worker, with live views of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cpr.extent import Extent


def _nothing() -> None:
    return None


@dataclass(frozen=True, eq=False, kw_only=True)
class TableShard:
    """Rows x columns of a table on one worker, with the optimizer state of those rows.

    All tensors are live views, which share memory with training. Row `i` of each tensor is row id
    `row_offset + i` of the table.
    """

    table_fqn: str
    """Fully qualified name of the table, as in `model.state_dict()` without the trailing `.weight`."""
    table_shape: tuple[int, int]
    """Rows and columns of the whole table."""
    row_offset: int
    """Row id of the first row."""
    col_offset: int
    """The first column."""
    replicated: bool
    """Whether every rank holds an equal copy of the whole table (data-parallel)."""
    weights: Tensor
    """`[num_rows, num_cols]`, the table's dtype."""
    optimizer_state: Mapping[str, Tensor]
    """State by PyTorch's name ("sum", "exp_avg", ...): `[num_rows]` for one number per row, `[num_rows,
    num_cols]` for one per element; and additional columns (`add_row_columns`). Empty for stateless
    optimizers."""
    counters: Mapping[str, Tensor] = field(default_factory=dict)
    """Live scalars of the table's optimizer, such as "iter"; shared by the table's shards."""
    updated_in_backward: bool = False
    """Whether training changes rows only in the backward pass (see `before_updates`), by a fused
    optimizer."""
    flush: Callable[[], None] = _nothing
    """Call before reading: writes rows in a device cache back to `weights`."""
    invalidate: Callable[[], None] = _nothing
    """Call after writing: drops the rows in a device cache, and updates the optimizer's counters and data
    derived from additional columns. Call `flush` before writing only some rows, or newer rows in the cache
    are lost."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.weights.shape[0]

    @property
    def num_cols(self) -> int:
        """Number of columns."""
        return self.weights.shape[1]

    @property
    def extent(self) -> Extent:
        """Rows and columns of the table."""
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
        """Weights and optimizer state by column name, which are saved and restored together."""
        return {"weights": self.weights, **self.optimizer_state}

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row with its optimizer state."""
        return sum(bytes_per_row(tensor) for tensor in self.columns.values())

    @property
    def table_name(self) -> str:
        """The table's own name, which is not unique in a model."""
        return self.table_fqn.rpartition(".")[2]

    @property
    def name(self) -> str:
        """Name of the shard: unique in a model, and valid as a path."""
        return self.extent.name

    def narrow(self, begin: int, end: int) -> "TableShard":
        """Live views of the rows from row id `begin` to before `end`.

        Raises:
            ValueError: the shard does not hold all of these rows.
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
