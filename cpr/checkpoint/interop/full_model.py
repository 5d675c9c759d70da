"""One state of a checkpoint as a full model: tables window by window, everything else by name.

Exporters need to know nothing about shards, chains and codecs. A table that is larger than memory is read in
windows of rows, each in its newest version.
"""

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from cpr.checkpoint.catalog.chain import State
from cpr.checkpoint.format.manifest import TableEntry
from cpr.checkpoint.load.shard_loader import load_shards, read_state_file
from cpr.checkpoint.storage.base import Storage
from cpr.shards.shard import TableShard

WINDOW_BYTES: Final = 64 * 2**20
"""Rows in memory at a time, in bytes. The loader's buffers take about 8 MB more for each of its threads."""
NOTES_FILE: Final = "cpr-export.json"
"""JSON file of an export with the step, counters, schedules and everything else that is not a tensor."""
NOTES_FORMAT: Final = "cpr-export"
NOTES_VERSION: Final = 1

TreePath = tuple[str, ...]
"""Keys and list indices from the root of a tree to a value in it."""


@dataclass(frozen=True, kw_only=True)
class TableColumn:
    """A column of a full table: its weights, or one optimizer state."""

    table_fqn: str
    name: str
    """`weights`, or the name of the optimizer state."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """`[rows, cols]`, or `[rows]` for one number per row."""

    @property
    def path(self) -> TreePath:
        """Path in the nested state that users of `torch.distributed.checkpoint` load."""
        parameter = f"{self.table_fqn}.weight"
        if self.name == "weights":
            return ("model", parameter)
        return ("optimizer", "state", parameter, self.name)

    @property
    def bytes_per_row(self) -> int:
        """Bytes of one row."""
        return int(np.prod(self.shape[1:], dtype=int)) * self.dtype.itemsize


class FullModel:
    """A saved state, read as one model without sharding."""

    def __init__(self, storage: Storage, state: State) -> None:
        self._storage = storage
        self._state = state
        self.tables = {fqn: _columns(fqn, entry) for fqn, entry in state.newest.tables.items()}
        self.tensors: dict[TreePath, Tensor] = {}
        """All other tensors; held in memory."""
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
        """Everything that is not a tensor, as JSON."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(
            column.shape[0] * column.bytes_per_row for columns in self.tables.values() for column in columns
        )

    def starts(self, table_fqn: str) -> range:
        """First rows of the windows of a table."""
        columns = self.tables[table_fqn]
        rows_at_once = max(1, WINDOW_BYTES // max(1, sum(column.bytes_per_row for column in columns)))
        return range(0, columns[0].shape[0], rows_at_once)

    def splits(self, table_fqn: str) -> list[tuple[int, int]]:
        """Column shards of a table: first column and number of columns of each part.

        Each part has its own optimizer state where that is one number per row. A table whose rows were not
        all split alike counts as one part.
        """
        entry = self._state.newest.tables[table_fqn]
        files = [file for file in self._state.saves[0].rows if file.table_fqn == table_fqn]
        parts = sorted({(file.col_offset, file.num_cols) for file in files})
        ends = [offset + num_cols for offset, num_cols in parts]
        if [offset for offset, _ in parts] == [0, *ends[:-1]] and ends[-1:] == [entry.cols]:
            return parts
        return [(0, entry.cols)]

    def window(
        self, table_fqn: str, first_row: int, part: tuple[int, int] | None = None
    ) -> dict[str, Tensor]:
        """Read the columns of the window that begins with a row of `starts`, by name, `[num_rows, ...]`.

        They are those of a part of `splits`; None: all, and for state with one number per row the mean of all
        parts weighted by their columns.
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
            # overwritten by the load, and unused: exports take counters from the manifest
            counters={name: torch.zeros((), dtype=torch.float64) for name in entry.counters},
        )
        load_shards(self._storage, self._state, [shard])
        return values

    def _read_rest(self) -> dict[str, Any]:
        notes = {}
        for entry in self._state.newest.states:
            tree: Any = read_state_file(self._storage, self._state, entry.rank)
            if entry.rank is None:
                notes["common"] = {
                    part: to_json(value, ("model" if part == "dense" else part,), self.tensors)
                    for part, value in tree.items()
                }
            else:
                name = f"rank{entry.rank}"
                notes[name] = to_json(tree, (name,), self.tensors)
        return notes


def _columns(table_fqn: str, table: TableEntry) -> list[TableColumn]:
    return [
        TableColumn(
            table_fqn=table_fqn,
            name=name,
            dtype=getattr(torch, column.dtype),
            shape=(table.rows, table.cols)[: 1 if column.per_row else 2],
        )
        for name, column in table.columns.items()
    ]


def to_json(tree: Any, path: TreePath, tensors: dict[TreePath, Tensor]) -> Any:
    """Convert nested state, as `cpr.checkpoint.format.tree_file` takes, to JSON that stays readable.

    Its tensors are added to `tensors`, under names that begin with `path`. Values that JSON lacks are objects
    with one key that begins with `$`: `$tensor` and `$array` name a tensor, `$raw_array` holds data type,
    shape and base64 of an array that PyTorch cannot hold, and `$bytes`, `$float`, `$tuple` and `$items` (a
    dict whose keys are not all plain strings) hold their values.
    """
    if isinstance(tree, Tensor):
        return {"$tensor": _add(tree, path, tensors)}
    if isinstance(tree, np.ndarray):
        return _array(tree, path, tensors)
    if isinstance(tree, list | tuple):
        values = [to_json(value, (*path, str(at)), tensors) for at, value in enumerate(tree)]
        return {"$tuple": values} if isinstance(tree, tuple) else values
    if isinstance(tree, Mapping):
        items = [(key, to_json(value, (*path, str(key)), tensors)) for key, value in tree.items()]
        is_plain = all(isinstance(key, str) and not key.startswith("$") for key in tree)
        return dict(items) if is_plain else {"$items": items}
    return _plain(tree)


def flat_name(path: Iterable[str]) -> str:
    """Name of the value at a path, as `torch.distributed.checkpoint` flattens nested state."""
    return ".".join(path)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    return value


def _array(array: "np.ndarray[Any, Any]", path: TreePath, tensors: dict[TreePath, Tensor]) -> Any:
    try:
        in_order = np.ascontiguousarray(array).reshape(array.shape)  # which adds a dimension to scalars
        return {"$array": _add(torch.from_numpy(in_order), path, tensors)}
    except (TypeError, ValueError):  # a data type or byte order that PyTorch lacks
        data = base64.b64encode(array.tobytes()).decode()
        return {"$raw_array": [array.dtype.str, list(array.shape), data]}


def _add(tensor: Tensor, path: TreePath, tensors: dict[TreePath, Tensor]) -> str:
    taken = {flat_name(other) for other in tensors}
    while flat_name(path) in taken:  # such as ("a.b",) after ("a", "b")
        path = (*path[:-1], path[-1] + "'")
    tensors[path] = tensor
    return flat_name(path)
