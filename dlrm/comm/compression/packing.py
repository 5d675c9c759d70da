"""Encoding of long vectors in chunks that fit the cache, into existing memory."""

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from dlrm.comm.compression.codecs import Plain, WireCodec

CHUNK: Final = 1 << 18
"""Values per chunk, a megabyte: they are still in the cache when their rounding error is computed."""


class Packing:
    """Applies a codec to vectors of any length, chunk by chunk."""

    def __init__(self, codec: WireCodec) -> None:
        self._codec = codec
        self.name: Final = codec.name
        self.is_lossless: Final = isinstance(codec, Plain)

    def num_bytes(self, num_values: int) -> int:
        """Length of the message of `num_values` values."""
        chunks, rest = divmod(num_values, CHUNK)
        return chunks * self._codec.num_bytes(CHUNK) + self._codec.num_bytes(rest)

    def aligned_bytes(self, num_values: int) -> int:
        """`num_bytes`, rounded up so that an fp32 can follow."""
        return -(-self.num_bytes(num_values) // 4) * 4

    def pack(self, values: Tensor, data: Tensor) -> None:
        """Encode values, and replace them by their rounding errors (0 where that is not finite).

        Args:
            values: fp32 `[n]`.
            data: uint8 `[num_bytes(n)]`, overwritten; aligned for fp32.
        """
        for part, chunk in self._chunks(values, data):
            encoded = self._codec.encode(part)
            chunk.copy_(encoded)
            part.sub_(self._codec.decode(encoded, part.numel()))
            part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def unpack(self, data: Tensor, values: Tensor) -> None:
        """Decode the message `data` into `values`, fp32 `[n]`."""
        for part, encoded in self._chunks(values, data):
            part.copy_(self._codec.decode(encoded, part.numel()))

    def add(self, data: Tensor, values: Tensor) -> None:
        """Decode the message `data` and add it to `values`, fp32 `[n]`."""
        for part, encoded in self._chunks(values, data):
            part.add_(self._codec.decode(encoded, part.numel()))

    def _chunks(self, values: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        begin = 0
        for first in range(0, values.numel(), CHUNK):
            part = values[first : first + CHUNK]
            end = begin + self._codec.num_bytes(part.numel())
            yield part, data[begin:end]
            begin = end
