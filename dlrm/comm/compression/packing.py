"""Values to bytes and back, a cache-sized chunk at a time and in memory that is there already."""

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from dlrm.comm.compression.codecs import Plain, WireCodec

CHUNK: Final = 1 << 18
"""Values: a megabyte of fp32. What is encoded is still in the cache when its error is taken."""


class Packing:
    """A codec for vectors of any length.

    Args:
        codec: encodes a chunk.
    """

    def __init__(self, codec: WireCodec) -> None:
        self._codec = codec
        self.name: Final = codec.name
        self.is_lossless: Final = isinstance(codec, Plain)

    def num_bytes(self, num_values: int) -> int:
        """That so many values take."""
        chunks, rest = divmod(num_values, CHUNK)
        return chunks * self._codec.num_bytes(CHUNK) + self._codec.num_bytes(rest)

    def aligned_bytes(self, num_values: int) -> int:
        """The same, and room so that an fp32 can lie behind."""
        return -(-self.num_bytes(num_values) // 4) * 4

    def pack(self, values: Tensor, data: Tensor) -> None:
        """Encode, and leave in `values` what was lost by that, as far as it is finite.

        Args:
            values: fp32 `[n]`.
            data: uint8 `[num_bytes(n)]`, overwritten; it begins where an fp32 may.
        """
        for part, room in self._chunks(values, data):
            encoded = self._codec.encode(part)
            room.copy_(encoded)
            part.sub_(self._codec.decode(encoded, part.numel()))
            part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def unpack(self, data: Tensor, values: Tensor) -> None:
        """Decode `data` (as of `pack`) into `values`, fp32 `[n]`."""
        for part, encoded in self._chunks(values, data):
            part.copy_(self._codec.decode(encoded, part.numel()))

    def add(self, data: Tensor, values: Tensor) -> None:
        """Decode `data` (as of `pack`) and add it to `values`, fp32 `[n]`."""
        for part, encoded in self._chunks(values, data):
            part.add_(self._codec.decode(encoded, part.numel()))

    def _chunks(self, values: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        begin = 0
        for first in range(0, values.numel(), CHUNK):
            part = values[first : first + CHUNK]
            end = begin + self._codec.num_bytes(part.numel())
            yield part, data[begin:end]
            begin = end
