"""Writes a full model as a directory of `torch.distributed.checkpoint` (DCP), in bounded memory.

`torch.distributed.checkpoint.load({"model": model.state_dict()})` reads it into plain or sharded tensors; the
names are those of TorchRec's `model.state_dict()`. As in TorchRec, optimizer state with one number per row of
a table that is split by columns is saved once for each part, one after the other.
"""

import io
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from cpr.checkpoint.interop.full_model import FullModel, TableColumn, TreePath, flat_name


def write_dcp(model: FullModel, folder: Path, progress: Callable[[int], object]) -> None:
    """Write tables (in pieces of `WINDOW_BYTES`), their optimizer states and all other tensors."""
    # One thread that copies nothing ahead takes the pieces in the order of the plan, one at a time.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            save({}, storage_writer=writer, planner=_Planner(model, progress), no_dist=True)
        except CheckpointException as error:  # wraps the errors of all ranks; here there is one rank
            raise _cause(next(iter(error.failures.values()))[0]) from None


def _cause(error: BaseException) -> BaseException:
    """The disk's error, which `torch.save` hides behind its failure to close the file."""
    first = error
    while first.__context__ is not None and not isinstance(first, OSError):
        first = first.__context__
    return first if isinstance(first, OSError) else error


_Window = tuple[str, int, tuple[int, int]]
"""Table, first row, and the first column and number of columns of the part."""


class _Planner(DefaultSavePlanner):
    """Plans pieces of tables that are read from the checkpoint only when they are written."""

    def __init__(self, model: FullModel, progress: Callable[[int], object]) -> None:
        super().__init__()
        self._model = model
        self._progress = progress
        self._pieces: dict[MetadataIndex, tuple[_Window, str]] = {}
        self._tensors = {flat_name(path): tensor for path, tensor in model.tensors.items()}
        self._window: tuple[_Window, dict[str, Tensor]] | None = None

    def create_local_plan(self) -> SavePlan:
        items = [*self._table_items(), *map(self._tensor_item, self._tensors)]
        paths: list[TreePath] = list(self._model.tensors)
        paths += [column.path for columns in self._model.tables.values() for column in columns]
        self.plan = SavePlan(items, planner_data={flat_name(path): path for path in paths})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        piece = self._pieces.get(write_item.index)
        if piece is None:
            return self._tensors[write_item.index.fqn].contiguous()
        place, name = piece
        if self._window is None or self._window[0] != place:
            self._window = None  # freed before the next one is read, so that only one is in memory
            self._window = (place, self._model.window(*place))
        rows = self._window[1][name]
        self._progress(rows.nbytes)
        return rows

    def _tensor_item(self, name: str) -> WriteItem:
        tensor = self._tensors[name]
        return _shard_item(name, tensor.dtype, tensor.shape, (0,) * tensor.dim(), tensor.shape)

    def _table_items(self) -> Iterator[WriteItem]:
        """Write items of all tables, window by window; the columns of a window follow each other."""
        for table_fqn, columns in self._model.tables.items():
            starts, parts = self._model.starts(table_fqn), self._model.splits(table_fqn)
            for number, part in enumerate(parts):
                for first_row in starts:
                    for column in columns:
                        item = _rows_item(column, first_row, starts.step, number, parts)
                        self._pieces[item.index] = (table_fqn, first_row, part), column.name
                        yield item


def _rows_item(
    column: TableColumn, first_row: int, max_rows: int, number: int, parts: Sequence[tuple[int, int]]
) -> WriteItem:
    """Some rows of part `number` of a column."""
    rows, *cols = column.shape
    num_rows = min(max_rows, rows - first_row)
    name = flat_name(column.path)
    if not cols:
        shape, offset = (rows * len(parts),), number * rows + first_row
        return _shard_item(name, column.dtype, shape, (offset,), (num_rows,))
    col_offset, num_cols = parts[number]
    return _shard_item(name, column.dtype, column.shape, (first_row, col_offset), (num_rows, num_cols))


def _shard_item(
    name: str, dtype: torch.dtype, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)),
            properties=TensorProperties(dtype=dtype),
            size=torch.Size(shape),
        ),
    )
