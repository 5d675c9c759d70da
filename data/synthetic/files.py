"""Writes blocks to files: Parquet for `data.loader`, or Criteo's raw lines for `data.prepare`.

A raw category is the 32-bit number `mix(first + id)` as eight hexadecimal digits, where `first` is
the number of ids in all columns before it at full scale, and `mix` is the finalizer of MurmurHash3,
a bijection on 32-bit numbers: all pairs (column, id) have different values, which do not reveal the ids.
"""

import contextlib
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from pyarrow import csv

from data.criteo import CATEGORY_NAMES, COLUMN_NAMES, DENSE_NAMES, LABEL
from data.synthetic.config import CARDINALITIES, COMPRESSIONS, SyntheticConfig
from data.synthetic.source import Block
from data.synthetic.teacher import Bag

HEX_PAIRS: Final = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), np.uint16)
HEX_DIGITS: Final = 8
GZIP_LEVEL: Final = 1
ZSTD_LEVEL: Final = 1


@dataclass(frozen=True)
class FilePlan:
    """The blocks of one file."""

    path: str
    """Relative to the data set's folder."""
    day: int
    blocks: tuple[int, ...]
    """Indices of the blocks, in order."""
    block_rows: tuple[int, ...]
    """Samples of each block."""

    @property
    def num_rows(self) -> int:
        """Samples in the file."""
        return sum(self.block_rows)


def plan_files(config: SyntheticConfig) -> list[FilePlan]:
    """The files of a data set, in time order."""
    sizes = config.blocks_of_day()
    if config.format == "tsv":
        names = ["day_{day}" + COMPRESSIONS[config.compression]]
        step = len(sizes)
    else:
        step = config.rows_per_file // config.rows_per_block
        names = [f"day={{day}}/part-{part:05d}.parquet" for part in range(-(-len(sizes) // step))]
    return [
        FilePlan(
            path=name.format(day=day),
            day=day,
            blocks=tuple(range(len(sizes)))[part * step : (part + 1) * step],
            block_rows=tuple(sizes[part * step : (part + 1) * step]),
        )
        for day in range(config.days)
        for part, name in enumerate(names)
    ]


def write_blocks(file: IO[bytes], config: SyntheticConfig, blocks: Iterator[Block]) -> None:
    """Write the blocks of a file."""
    if config.format == "parquet":
        _write_parquet(file, config, blocks)
    else:
        with _compressed(file, config.compression) as stream:
            for block in blocks:
                _write_lines(stream, config, block)


def _write_parquet(file: IO[bytes], config: SyntheticConfig, blocks: Iterator[Block]) -> None:
    ids_type = pa.list_(pa.int32()) if config.multi_hot else pa.int32()
    columns = [(LABEL, pa.int8())]
    columns += [(name, pa.float32()) for name in DENSE_NAMES]
    columns += [(name, ids_type) for name in CATEGORY_NAMES]
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns])
    # page checksums let a reader notice a flipped bit, which would decode without one
    options = {"compression": "zstd", "compression_level": ZSTD_LEVEL, "write_page_checksum": True}
    with pq.ParquetWriter(file, schema, **options) as writer:
        for block in blocks:
            arrays = [pa.array(block.labels), *map(pa.array, block.dense.T), *map(_ids_array, block.bags)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=len(block))


def _ids_array(bag: Bag) -> pa.Array:
    values = pa.array(bag.ids.astype(np.int32))
    if bag.lengths is None:
        return values
    offsets = np.zeros(len(bag.lengths) + 1, np.int32)
    np.cumsum(bag.lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def _compressed(
    file: IO[bytes], compression: str
) -> contextlib.AbstractContextManager[IO[bytes] | gzip.GzipFile]:
    """A stream that compresses into `file`; closing it leaves the file open."""
    if compression == "gz":
        return gzip.GzipFile("", "wb", GZIP_LEVEL, file, mtime=0)  # no name, no time: the same bytes
    if compression == "zst":
        return zstandard.ZstdCompressor(level=ZSTD_LEVEL).stream_writer(file, closefd=False)
    return contextlib.nullcontext(file)


def _write_lines(stream: IO[bytes] | gzip.GzipFile, config: SyntheticConfig, block: Block) -> None:
    arrays = [pa.array(block.labels)]
    for column, missing in zip(block.integers.T, block.integers_missing.T, strict=True):
        arrays.append(pa.array(column, mask=missing))
    first = 0
    for bag, cardinality in zip(block.bags, CARDINALITIES[config.preset], strict=True):
        arrays.append(_hex_array(bag.ids, first))
        first += cardinality
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    csv.write_csv(pa.Table.from_arrays(arrays, names=list(COLUMN_NAMES)), stream, options)


def _hex_array(ids: npt.NDArray[np.int64], first: int) -> pa.Array:
    """Eight hexadecimal digits for each id; null where the id is 0."""
    octets = mix((ids + first).astype(np.uint32)).astype(">u4").view(np.uint8)
    text = HEX_PAIRS[octets].tobytes()
    offsets = np.arange(len(ids) + 1, dtype=np.int32) * HEX_DIGITS
    present = pa.array(ids != 0).buffers()[1]
    return pa.Array.from_buffers(pa.string(), len(ids), [present, pa.py_buffer(offsets), pa.py_buffer(text)])


def mix(numbers: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """MurmurHash3's 32-bit finalizer: a bijection on uint32."""
    mixed = numbers ^ (numbers >> np.uint32(16))
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(13)
    mixed *= np.uint32(0xC2B2AE35)
    mixed ^= mixed >> np.uint32(16)
    return mixed
