"""One cached row group as bytes: a header with a checksum, then an uncompressed Arrow IPC stream.

Uncompressed, so that a mapped file is the table: reading it copies and decodes nothing.
"""

import struct
import zlib
from typing import Final

import pyarrow as pa

MAGIC: Final = b"CPR-CACHE-1\0"
HEADER: Final = struct.Struct("<12sIQ40x")
"""Magic, CRC-32 of the IPC stream, its length; 64 bytes, so that mapped columns stay aligned."""


def encode(table: pa.Table) -> pa.Buffer:
    """The bytes of the entry for `table`."""
    sink = pa.BufferOutputStream()
    sink.write(bytes(HEADER.size))
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    blob = sink.getvalue()
    body = blob.slice(HEADER.size)
    memoryview(blob).cast("B")[: HEADER.size] = HEADER.pack(MAGIC, zlib.crc32(body), body.size)
    return blob


def is_whole(blob: pa.Buffer) -> bool:
    """Whether the bytes are those that `encode` made. Reads all of them."""
    if blob.size < HEADER.size:
        return False
    magic, checksum, size = HEADER.unpack(blob.slice(0, HEADER.size))
    body = blob.slice(HEADER.size)
    return bool(magic == MAGIC and size == body.size and zlib.crc32(body) == checksum)


def decode(blob: pa.Buffer) -> pa.Table:
    """The table, as a view of the bytes."""
    return pa.ipc.open_stream(blob.slice(HEADER.size)).read_all()
