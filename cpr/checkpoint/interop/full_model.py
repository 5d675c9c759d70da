"""One state of a checkpoint as a whole model: tables window by window, everything else by name.

Exporters see nothing of shards, chains and codecs. A table that is larger than memory passes by in windows
of rows, each with its row saves already laid over the base.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.format.manifest import ColumnEntry, TableEntry
from cpr.checkpoint.interop.json_tree import Path, to_notes
from cpr.checkpoint.load.loader import load_shards, read_state_file
from cpr.checkpoint.storage.base import Storage
from cpr.shards.shard import TableShard

WINDOW_BYTES: Final = 64 * 2**20
"""Of rows in memory at a time. The loader's buffers come on top: about 8 MB for each of its threads."""
NOTES_FILE: Final = "cpr-export.json"
"""Beside the tensors of an export: step, counters, schedules and all else that is no tensor."""
NOTES_FORMAT: Final = "cpr-export"
NOTES_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True)
class Column:
    """Weights of a table, or one state of its optimizer, whole."""

    table_fqn: str
    name: str
    """`weights`, or that of the state."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """`[rows, cols]`, or `[rows]` where there is one number a row."""

    @property
    def path(self) -> Path:
        """Where users of `torch.distributed.checkpoint` look for it."""
        parameter = f"{self.table_fqn}.weight"
        if self.name == "weights":
            return ("model", parameter)
        return ("optimizer", "state", parameter, self.name)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=int)) * self.dtype.itemsize


@dataclass(frozen=True, eq=False, kw_only=True)
class Window:
    """Some rows of a table."""

    first_row: int
    columns: dict[str, Tensor]
    """`[num_rows, ...]` each."""


class WholeModel:
    """A state that is read as one model.

    Args:
        storage: the checkpoint directory.
        state: one that `find_states` found.

    Raises:
        CorruptFileError: a file of what is no table is damaged.
    """

    def __init__(self, storage: Storage, state: State) -> None:
        self._storage = storage
        self._state = state
        self.tables = {fqn: table_columns(fqn, entry) for fqn, entry in state.newest.tables.items()}
        """Columns of each table."""
        self.tensors: dict[Path, Tensor] = {}
        """Everything else that is a tensor; held in memory."""
        self.notes: dict[str, Any] = {
            "format": NOTES_FORMAT,
            "version": NOTES_VERSION,
            "run_id": state.newest.run_id,
            "sequence": state.sequence,
            "step": state.step,
            "created": state.newest.created,
            "world_size": state.newest.world_size,
            "tables": {fqn: asdict(entry) for fqn, entry in state.newest.tables.items()},
            "state": self._read_rest(),
        }
        """Everything that is no tensor, as JSON."""

    @property
    def num_bytes(self) -> int:
        """Of all tables."""
        return sum(
            column.shape[0] * column.bytes_per_row for columns in self.tables.values() for column in columns
        )

    def starts(self, table_fqn: str) -> range:
        """First rows of the windows of a table."""
        columns = self.tables[table_fqn]
        rows_at_once = max(1, WINDOW_BYTES // max(1, sum(column.bytes_per_row for column in columns)))
        return range(0, columns[0].shape[0], rows_at_once)

    def splits(self, table_fqn: str) -> list[tuple[int, int]]:
        """Where the table was split by columns: first column and number of columns of each part.

        The parts of such a table have each their own state where there is one number a row. A table that
        was not split everywhere alike is one part.
        """
        entry = self._state.newest.tables[table_fqn]
        files = [file for file in self._state.saves[0].rows if file.table_fqn == table_fqn]
        parts = sorted({(file.col_offset, file.num_cols) for file in files})
        ends = [offset + num_cols for offset, num_cols in parts]
        if [offset for offset, _ in parts] == [0, *ends[:-1]] and ends[-1:] == [entry.cols]:
            return parts
        return [(0, entry.cols)]

    def window(self, table_fqn: str, first_row: int, part: tuple[int, int] | None = None) -> Window:
        """The window that begins with a row.

        Args:
            table_fqn: of the table.
            first_row: one of `starts`.
            part: one of `splits`; None: all columns, and of state with one number a row the mean of all parts
                weighted by their columns.

        Raises:
            CorruptFileError: a file that it needs is damaged.
        """
        columns = self.tables[table_fqn]
        entry = self._state.newest.tables[table_fqn]
        col_offset, num_cols = part or (0, entry.cols)
        num_rows = min(self.starts(table_fqn).step, entry.rows - first_row)
        values = {c.name: torch.empty((num_rows, num_cols)[: len(c.shape)], dtype=c.dtype) for c in columns}
        shard = TableShard(
            table_fqn=table_fqn,
            table_shape=(entry.rows, entry.cols),
            row_offset=first_row,
            col_offset=col_offset,
            replicated=False,
            weights=values["weights"],
            optimizer_state={name: value for name, value in values.items() if name != "weights"},
            counters={name: torch.zeros((), dtype=torch.float64) for name in entry.counters},
        )
        load_shards(self._storage, self._state, [shard])
        return Window(first_row=first_row, columns=values)

    def windows(self, table_fqn: str) -> Iterator[Window]:
        """All rows of a table, in order.

        Raises:
            CorruptFileError: a file that it needs is damaged.
        """
        for first_row in self.starts(table_fqn):
            yield self.window(table_fqn, first_row)

    def _read_rest(self) -> dict[str, Any]:
        notes = {}
        for entry in self._state.newest.states:
            tree: Any = read_state_file(self._storage, self._state, entry.rank)
            if entry.rank is None:
                notes["common"] = {
                    part: to_notes(value, ("model" if part == "dense" else part,), self.tensors)
                    for part, value in tree.items()
                }
            else:
                name = f"rank{entry.rank}"
                notes[name] = to_notes(tree, (name,), self.tensors)
        return notes


def table_columns(table_fqn: str, entry: TableEntry) -> list[Column]:
    """The columns of a table, weights first."""

    def column(name: str, column: ColumnEntry) -> Column:
        shape = (entry.rows,) if column.per_row else (entry.rows, entry.cols)
        return Column(table_fqn=table_fqn, name=name, dtype=getattr(torch, column.dtype), shape=shape)

    return [column(name, each) for name, each in entry.columns.items()]
