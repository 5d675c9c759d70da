"""Reads parts of tensors from a directory of `torch.distributed.checkpoint`, whatever pieces they are in.

Reading such a directory unpickles its `.metadata`, as PyTorch itself does: read only what you trust.
"""

import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from cpr.errors import CheckpointError, CorruptFileError

_NOWHERE = torch.Size([0])


class DcpDirectory:
    """What `torch.distributed.checkpoint.save` has written.

    Args:
        folder: with a file `.metadata`.

    Raises:
        CheckpointError: it is no such directory, or a damaged one.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reader = FileSystemReader(folder)
        try:
            metadata = self._reader.read_metadata()
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder / '.metadata'} is not there: name a directory of torch.distributed.checkpoint"
            ) from error
        except (pickle.UnpicklingError, EOFError, AttributeError, ImportError, IndexError) as error:
            raise CorruptFileError(
                f"{folder / '.metadata'} cannot be read ({error}): it is damaged or of another PyTorch"
            ) from error
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        self._paths: dict[str, tuple[str | int, ...]] = metadata.planner_data or {}
        entries = metadata.state_dict_metadata
        self.tensors = {name: e for name, e in entries.items() if isinstance(e, TensorStorageMetadata)}
        """Sizes, data types and pieces of tensors by name."""
        self.values = sorted(set(entries) - set(self.tensors))
        """Names of what is no tensor."""

    def path(self, name: str) -> tuple[str | int, ...]:
        """Where in the nested state that was saved a name comes from; `(name,)` if that was not nested."""
        return tuple(self._paths.get(name, (name,)))

    def read(
        self, name: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """A part of a tensor, or all of it. Takes memory for the part, and for the largest piece it touches.

        Raises:
            CorruptFileError: a file is missing or damaged, or no piece holds some of it.
        """
        whole = self.tensors[name]
        part = ChunkStorageMetadata(
            offsets=torch.Size(offsets or [0] * len(whole.size)),
            sizes=torch.Size(sizes or whole.size),
        )
        target = torch.empty(part.sizes, dtype=whole.properties.dtype)
        items = create_read_items_for_chunk_list(name, whole, [part])
        if sum(item.lengths.numel() for item in items) < target.numel():
            raise CorruptFileError(f"{self._folder} lacks a part of {name}: it is damaged")
        self._run(LoadPlan(items), _IntoTensor(target), name)
        return target

    def read_value(self, name: str) -> Any:
        """Something that is no tensor; only plain values are unpickled.

        Raises:
            CorruptFileError: it is missing, damaged, or an object of some class.
        """
        index = MetadataIndex(name)
        item = ReadItem(LoadItemType.BYTE_IO, index, _NOWHERE, index, _NOWHERE, _NOWHERE)
        planner = _IntoValue()
        self._run(LoadPlan([item]), planner, name)
        return planner.value

    def _run(self, plan: LoadPlan, planner: DefaultLoadPlanner, name: str) -> None:
        try:
            self._reader.read_data(plan, planner).wait()
        except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError, AssertionError) as error:
            raise CorruptFileError(f"{name} cannot be read from {self._folder}: {error}") from error


class _IntoTensor(DefaultLoadPlanner):
    """Hands out the places in one tensor."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self._target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        return narrow_tensor_by_index(self._target, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: it was read into place."""


class _IntoValue(DefaultLoadPlanner):
    """Unpickles one value."""

    value: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.value = torch.load(value, weights_only=True)
