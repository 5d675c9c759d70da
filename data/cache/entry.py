"""The file format of a cached row group: a header with a checksum and an uncompressed Arrow IPC stream.

Without compression a memory-mapped file is the table, which needs neither copies nor decoding.
"""

import struct
import zlib
from typing import Final

import pyarrow as pa

MAGIC: Final = b"CPR-CACHE-1\0"
HEADER: Final = struct.Struct("<12sIQ40x")
"""Magic, CRC-32 of the IPC stream, its length; 64 bytes, so that mapped columns stay aligned."""


class Encoder:
    """Encodes tables into one reused buffer.

    Fresh memory for each table would slow down the thread that decodes, since both map pages of one process.
    """

    def __init__(self) -> None:
        self._buffer = pa.allocate_buffer(0)

    def encode(self, table: pa.Table) -> pa.Buffer:
        """Encode a table; the returned bytes are valid until the next call."""
        measure = pa.MockOutputStream()
        _write(table, measure)
        size = measure.size()
        if self._buffer.size < size:
            self._buffer = pa.allocate_buffer(size)
        _write(table, pa.FixedSizeBufferWriter(self._buffer))
        body = self._buffer.slice(HEADER.size, size - HEADER.size)
        header = HEADER.pack(MAGIC, zlib.crc32(body), body.size)
        memoryview(self._buffer).cast("B")[: HEADER.size] = header
        return self._buffer.slice(0, size)


def is_whole(blob: pa.Buffer) -> bool:
    """Whether the bytes match their checksum; reads all of them."""
    if blob.size < HEADER.size:
        return False
    magic, checksum, size = HEADER.unpack(blob.slice(0, HEADER.size))
    body = blob.slice(HEADER.size)
    return bool(magic == MAGIC and size == body.size and zlib.crc32(body) == checksum)


def decode(blob: pa.Buffer) -> pa.Table:
    """Decode the table as a view of the bytes."""
    return pa.ipc.open_stream(blob.slice(HEADER.size)).read_all()


def _write(table: pa.Table, sink: pa.NativeFile) -> None:
    sink.write(bytes(HEADER.size))  # placeholder for the header
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
