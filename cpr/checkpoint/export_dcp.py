"""Writes a whole model as a directory of `torch.distributed.checkpoint`, in bounded memory.

`torch.distributed.checkpoint.load({"model": model.state_dict()})` reads it into plain or sharded tensors; the
names are those that TorchRec's `model.state_dict()` and fused optimizers have.
"""

import io
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from cpr.checkpoint.notes import Path as TreePath
from cpr.checkpoint.notes import flat_name
from cpr.checkpoint.whole import Column, WholeModel, Window


def write_dcp(model: WholeModel, folder: Path, progress: Callable[[int], object]) -> None:
    """Write tables (in pieces of `WINDOW_BYTES`), their optimizer states and all other tensors.

    Args:
        model: what to write.
        folder: an empty one.
        progress: called with the bytes of table rows written since the last call.
    """
    # One thread that copies nothing ahead takes the pieces in the order of the plan, one at a time.
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save({}, storage_writer=writer, planner=_Planner(model, progress), no_dist=True)


@dataclass(frozen=True)
class _Piece:
    """Where the rows of a write item come from."""

    column: Column
    first_row: int


class _Planner(DefaultSavePlanner):
    """Plans pieces of tables that are read only when their turn to be written has come."""

    def __init__(self, model: WholeModel, progress: Callable[[int], object]) -> None:
        super().__init__()
        self._model = model
        self._progress = progress
        self._pieces: dict[MetadataIndex, _Piece] = {}
        self._tensors = {flat_name(path): tensor for path, tensor in model.tensors.items()}
        self._window: tuple[str, Window] | None = None

    def create_local_plan(self) -> SavePlan:
        items = [*self._table_items(), *(_item(name, tensor) for name, tensor in self._tensors.items())]
        paths: list[TreePath] = list(self._model.tensors)
        paths += [column.path for columns in self._model.tables.values() for column in columns]
        self.plan = SavePlan(items, planner_data={flat_name(path): path for path in paths})
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        piece = self._pieces.get(write_item.index)
        if piece is None:
            return self._tensors[write_item.index.fqn].contiguous()
        table, first_row = piece.column.table_fqn, piece.first_row
        if self._window is None or (self._window[0], self._window[1].first_row) != (table, first_row):
            self._window = None  # before the next is read: only one is ever in memory
            self._window = (table, self._model.window(table, first_row))
        rows = self._window[1].columns[piece.column.name]
        self._progress(rows.nbytes)
        return rows

    def _table_items(self) -> Iterator[WriteItem]:
        """Window by window, all columns of a window one after the other."""
        for table_fqn, columns in self._model.tables.items():
            starts = self._model.starts(table_fqn)
            for first_row in starts:
                for column in columns:
                    num_rows = min(starts.step, column.shape[0] - first_row)
                    offsets = (first_row, *(0 for _ in column.shape[1:]))
                    sizes = (num_rows, *column.shape[1:])
                    item = _shard_item(flat_name(column.path), column.dtype, column.shape, offsets, sizes)
                    self._pieces[item.index] = _Piece(column, first_row)
                    yield item


def _item(name: str, tensor: Tensor) -> WriteItem:
    offsets = (0,) * tensor.dim()
    return _shard_item(name, tensor.dtype, tensor.shape, offsets, tensor.shape)


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
