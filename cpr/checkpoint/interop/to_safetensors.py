"""Writes a full model as safetensors files with an index, in bounded memory.

The format stores each tensor contiguously, so a table, however large, is in one file; its offset is known
before its rows are read, so windows of rows are written to their places. Reading a full table takes memory
for it; `safetensors.safe_open(...).get_slice(name)` reads any part.

Format: https://huggingface.co/docs/safetensors (8 bytes header length, JSON header, tensors).
"""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from cpr.checkpoint.interop.full_model import FullModel, flat_name

FILE_BYTES: Final = 4 * 2**30
"""A file of at least this size gets no further tensor."""
DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class _Item:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class _Place:
    file: BufferedRandom
    offset: int

    def write(self, tensor: Tensor, skip_bytes: int = 0) -> None:
        self.file.seek(self.offset + skip_bytes)
        self.file.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


def write_safetensors(model: FullModel, folder: Path, progress: Callable[[int], object]) -> None:
    """Write tables, their optimizer states and all other tensors.

    Raises:
        ValueError: a tensor has a data type that safetensors lacks.
    """
    columns = [column for each in model.tables.values() for column in each]
    items = [_Item(flat_name(column.path), column.dtype, column.shape) for column in columns]
    items += [_Item(flat_name(path), each.dtype, tuple(each.shape)) for path, each in model.tensors.items()]
    with ExitStack() as files:
        places = _lay_out(items, folder, files)
        for path, tensor in model.tensors.items():
            places[flat_name(path)].write(tensor)
        for table_fqn, each in model.tables.items():
            for first_row in model.starts(table_fqn):
                window = model.window(table_fqn, first_row)
                for column in each:
                    rows = window[column.name]
                    places[flat_name(column.path)].write(rows, first_row * column.bytes_per_row)
                    progress(rows.nbytes)


def _lay_out(items: list[_Item], folder: Path, files: ExitStack) -> dict[str, _Place]:
    """Create the files with their headers, and their index; returns the place of each tensor."""
    groups = _split(items)
    places: dict[str, _Place] = {}
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        header = _header(group)
        file = files.enter_context((folder / name).open("w+b"))
        files.callback(_sync, file)
        file.write(header)
        offset = len(header)
        for item in group:
            places[item.name] = _Place(file, offset)
            weight_map[item.name] = name
            offset += item.num_bytes
        file.truncate(offset)
    index = {"metadata": {"total_size": sum(item.num_bytes for item in items)}, "weight_map": weight_map}
    with (folder / "model.safetensors.index.json").open("w") as file_:
        json.dump(index, file_, indent=1)
        file_.flush()
        os.fsync(file_.fileno())
    return places


def _split(items: list[_Item]) -> list[list[_Item]]:
    groups: list[list[_Item]] = [[]]
    for item in items:
        if sum(other.num_bytes for other in groups[-1]) >= FILE_BYTES:
            groups.append([])
        groups[-1].append(item)
    return groups


def _header(items: list[_Item]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for item in items:
        if item.dtype not in DTYPES:
            raise ValueError(f"safetensors has no data type for {item.name} ({item.dtype}); export to dcp")
        end = begin + item.num_bytes
        entries[item.name] = {
            "dtype": DTYPES[item.dtype],
            "shape": list(item.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return len(text).to_bytes(8, "little") + text


def _sync(file: BufferedRandom) -> None:
    file.flush()
    os.fsync(file.fileno())
