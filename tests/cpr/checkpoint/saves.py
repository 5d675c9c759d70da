"""Saved states in memory, made of plain tensors by the writer that training uses."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from cpr.checkpoint.format.manifest import Manifest, Parent, save_folder
from cpr.checkpoint.format.part import merge_tables, tables_of
from cpr.checkpoint.format.row_file import RowBatch
from cpr.checkpoint.save.writer_thread import RankWriter
from cpr.errors import CorruptFileError
from cpr.shards.shard import TableShard


class MemoryStorage:
    """Storage in a dictionary that remembers what was read."""

    uri, readers = "memory", 4

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.reads: list[tuple[str, int, int]] = []
        """Path, offset and length."""
        self.before: Callable[[str, str, memoryview | None], object] = lambda method, path, buffer: None
        """Called with the name of a method, its path and its buffer, in the thread that calls."""
        self._lock = threading.Lock()

    @contextmanager
    def create(self, path: str) -> Iterator["_MemorySink"]:
        sink = _MemorySink()
        yield sink
        self.files[path] = bytes(sink.data)

    def read_into(self, path: str, offset: int, buffer: memoryview) -> None:
        self.before("read_into", path, buffer)
        size = self.size(path)
        if offset + len(buffer) > size:
            raise CorruptFileError(f"{path} ends at byte {size}")
        buffer[:] = self.files[path][offset : offset + len(buffer)]
        with self._lock:
            self.reads.append((path, offset, len(buffer)))

    def size(self, path: str) -> int:
        self.before("size", path, None)
        if path not in self.files:
            raise CorruptFileError(f"{path} is not there")
        return len(self.files[path])

    def list(self, folder: str = "") -> Iterator[str]:
        self.before("list", folder, None)
        prefix = f"{folder}/" if folder else ""
        inside = {path.removeprefix(prefix).split("/")[0] for path in self.files if path.startswith(prefix)}
        yield from sorted(inside)

    def delete(self, path: str) -> None:
        self.before("delete", path, None)
        self.files = {
            name: data for name, data in self.files.items() if not f"{name}/".startswith(f"{path}/")
        }

    def copy(self) -> "MemoryStorage":
        other = MemoryStorage()
        other.files = dict(self.files)
        return other

    def flip_bit(self, path: str, byte: int, bit: int = 0) -> None:
        data = bytearray(self.files[path])
        data[byte] ^= 1 << bit
        self.files[path] = bytes(data)


class _MemorySink:
    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: memoryview) -> None:
        self.data += data


def manifest_path(sequence: int, epoch: int = 0) -> str:
    return f"{save_folder(sequence, epoch)}/manifest.json"


def commit(
    storage: MemoryStorage, sequence: int, parent: Manifest | None = None, /, **fields: Any
) -> Manifest:
    """Write a manifest: a base, or a row save on `parent`; `fields` override what it says."""
    manifest = Manifest(
        **{
            "run_id": parent.run_id if parent else "run-a",
            "sequence": sequence,
            "kind": "rows" if parent else "base",
            "parent": parent and Parent(sequence=parent.sequence, digest=parent.file_digest),
            "base": parent.base if parent else sequence,
            "moment": "consistent",
            "step": 10 * sequence,
            "created": "2026-01-01T00:00:00+00:00",
            "world_size": 1,
            "tables": parent.tables if parent else {},
            "rows": (),
            "states": (),
            **fields,
        }
    )
    with storage.create(manifest.path) as sink:
        sink.write(memoryview(manifest.to_json()))
    return manifest


def make_shard(
    fqn: str = "model.t",
    shape: tuple[int, int] = (100, 8),
    rows: tuple[int, int] | None = None,
    cols: tuple[int, int] | None = None,
    states: Mapping[str, bool] | None = None,
    dtype: torch.dtype = torch.float32,
    **fields: Any,
) -> TableShard:
    """A shard of rows and columns from .. to before .., all of the table by default, filled with NaN.

    `states` are the optimizer's: whether there is one number a row.
    """
    (row, row_end), (col, col_end) = rows or (0, shape[0]), cols or (0, shape[1])
    size = (row_end - row, col_end - col)
    per_row = {"sum": True} if states is None else states
    return TableShard(
        **{
            "table_fqn": fqn,
            "table_shape": shape,
            "row_offset": row,
            "col_offset": col,
            "replicated": False,
            "weights": torch.full(size, torch.nan, dtype=dtype),
            "optimizer_state": {
                name: torch.full(size[:1] if alone else size, torch.nan) for name, alone in per_row.items()
            },
            **fields,
        }
    )


def randomise(shard: TableShard, generator: torch.Generator) -> None:
    """Fill with multiples of 1/8, which every data type holds exactly."""
    for column in shard.columns.values():
        column.copy_(torch.randint(-64, 64, column.shape, generator=generator) / 8)


def save(
    storage: MemoryStorage,
    sequence: int,
    shards: Sequence[TableShard],
    parent: Manifest | None = None,
    ids: Mapping[str, Tensor] | None = None,
    rows_per_chunk: int = 16,
    codec: str = "exact",
    state: Mapping[str, Any] | None = None,
    step: int | None = None,
    **fields: Any,
) -> Manifest:
    """Save shards as the ranks that hold them would: a base, or on `parent` the rows `ids` by shard name."""
    step = 10 * sequence if step is None else step
    writer = RankWriter(storage, save_folder(sequence), codec, with_ids=parent is not None)
    for shard in shards:
        everything = torch.arange(shard.row_offset, shard.row_offset + shard.num_rows)
        chosen = everything if parent is None else (ids or {}).get(shard.name, everything[:0])
        for some in chosen.split(rows_per_chunk):
            if len(some):
                columns = {name: each[some - shard.row_offset] for name, each in shard.columns.items()}
                rows = RowBatch(int(some[0]), None if parent is None else some, columns)
                writer.write(shard.extent, rows, 10 * sequence)
    if state is not None:
        common = {"steps_done": step, "dense": {}, "registered": {}}
        writer.write_state({**common, **state, "steps_done": step}, None)
    part = writer.finish(tables_of(shards))
    tables = merge_tables([part])
    fields = {"tables": tables, "rows": part.rows, "states": part.states, "step": step, **fields}
    return commit(storage, sequence, parent, **fields)
