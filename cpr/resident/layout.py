"""Layout of a worker's memory: which shard lies where, in a file that a process without the model can read.

`layout.json` appears by a rename when everything it lists is complete, and carries a checksum of itself.
"""

import json
import math
import os
import secrets
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from cpr.errors import DamagedMemoryError
from cpr.extent import Extent
from cpr.resident.folders import open_private, other_version, reading

LAYOUT_FILE: Final = "layout.json"
FORMAT_NAME: Final = "cpr-resident"
FORMAT: Final = f"{FORMAT_NAME} 6"
REGION_SUFFIX: Final = ".memory"


@dataclass(frozen=True, kw_only=True)
class TensorPlace:
    """Position of a tensor in a file; it is contiguous and row-major."""

    file: str
    offset: int
    """Elements from the file's beginning."""
    shape: tuple[int, ...]
    dtype: str
    """"float32", ..."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch's object.

        Raises:
            ValueError: PyTorch has no dtype of this name.
        """
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"{self.dtype!r} is no dtype")
        return found

    def view(self, region: Tensor) -> Tensor:
        """The tensor in its mapped file, `[bytes]` uint8."""
        first = self.offset * self.torch_dtype.itemsize
        return region[first : first + self.num_bytes].view(self.torch_dtype).view(self.shape)


@dataclass(frozen=True, kw_only=True)
class StoredShard:
    """A table shard in memory."""

    extent: Extent
    columns: dict[str, TensorPlace]
    """Weights and optimizer state by column name."""


@dataclass(frozen=True, kw_only=True)
class KernelMemory:
    """The memory of one FBGEMM module, for the next process that builds the same."""

    signature: str
    """Description of the module: equal signatures mean equal memory layouts."""
    files: dict[str, str]
    """File by name of the module's tensor, such as "weights_host"."""


@dataclass(frozen=True, kw_only=True)
class RegionFile:
    """Size and digest of a file."""

    num_bytes: int
    digest: str | None = None
    """XXH3-128 of a copy made when the worker left; None: live memory, which has none."""
    update_begun: int | None = None
    """`StatusPage.update_begun` when the copy was made; the copy is stale if another step began after it."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Content of a sealed segment."""

    session_id: str
    rank: int
    world_size: int
    generation: int
    files: dict[str, RegionFile]
    kernels: tuple[KernelMemory, ...]
    """In the order in which they were built."""
    shards: tuple[StoredShard, ...]
    companions: dict[str, str]
    """File by name of data about the tables, such as counters of lookups."""
    outside_bytes: int = 0
    """Bytes of the worker's sharded tables elsewhere, such as on a GPU, which end with it."""
    is_mirror: bool = False
    """Whether this is the copy that another worker kept of the rows of `rank` (see `cpr.mirror`)."""

    def write(self, folder: Path) -> None:
        """Write the layout into a segment's folder, atomically."""
        content = asdict(self)
        data = json.dumps({"format": FORMAT, "crc": _crc(content), "layout": content}).encode()
        temporary = folder / f".{LAYOUT_FILE}.{secrets.token_hex(4)}"
        file = open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        with os.fdopen(file, "wb") as sink:
            sink.write(data)
        temporary.replace(folder / LAYOUT_FILE)


def read_layout(folder: Path) -> Layout | None:
    """Read a segment's layout; None: the segment is not sealed.

    Raises:
        DamagedMemoryError: the layout, or a file that it lists, differs from what was written.
        UnreadableMemoryError: the layout cannot be read now, or was written by another version.
    """
    path = folder / LAYOUT_FILE
    with reading(path):
        try:
            file = open_private(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        with os.fdopen(file, "rb") as source:
            data = source.read()
    try:
        stored = json.loads(data)
        if stored["format"] != FORMAT:
            if str(stored["format"]).startswith(f"{FORMAT_NAME} "):
                raise other_version(path, stored["format"], FORMAT)
            raise ValueError(f"its format is {stored['format']!r}, not {FORMAT!r}")
        if stored["crc"] != _crc(stored["layout"]):
            raise ValueError("it differs from its checksum")
        layout = _parsed(stored["layout"])
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise DamagedMemoryError(f"{path} is damaged: {error}") from error
    _check_files(folder, layout)
    return layout


def region_path(folder: Path, name: str) -> Path:
    """Path of the file called `name` in a layout."""
    if not name or "/" in name or name.startswith("."):
        raise ValueError(f"{name!r} is no name for a region")
    return folder / f"{name}{REGION_SUFFIX}"


def _crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _parsed(stored: dict[str, Any]) -> Layout:
    return Layout(
        **stored
        | {
            "files": {name: RegionFile(**file) for name, file in stored["files"].items()},
            "kernels": tuple(KernelMemory(**kernel) for kernel in stored["kernels"]),
            "shards": tuple(_shard(shard) for shard in stored["shards"]),
        }
    )


def _shard(stored: dict[str, Any]) -> StoredShard:
    rows, cols = stored["extent"]["table_shape"]
    columns = {
        name: TensorPlace(**place | {"shape": tuple(place["shape"])})
        for name, place in stored["columns"].items()
    }
    return StoredShard(extent=Extent(**stored["extent"] | {"table_shape": (rows, cols)}), columns=columns)


def _check_files(folder: Path, layout: Layout) -> None:
    for name, file in layout.files.items():
        path = region_path(folder, name)
        with reading(path), os.fdopen(open_private(path, os.O_RDONLY), "rb") as source:
            found = os.fstat(source.fileno()).st_size
        if found != file.num_bytes:
            raise DamagedMemoryError(f"{path} has {found} bytes instead of {file.num_bytes}")
    for shard in layout.shards:
        for column, place in shard.columns.items():
            file_bytes = layout.files[place.file].num_bytes if place.file in layout.files else -1
            if place.offset * place.torch_dtype.itemsize + place.num_bytes > file_bytes:
                table = shard.extent.table_fqn
                raise DamagedMemoryError(f"{column} of {table} lies outside of {place.file!r}")
