"""Codecs encode the values of a gradient in fewer bytes on the wire, each with a bounded error.

The length of a message depends only on the number of values, so that ranks know it in advance. The sender
keeps the rounding error of what it sent (error feedback), so that no value is lost for good.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

BLOCK: Final = 1024
"""Values that share a scale in `WireInt8`."""
SCALE_BYTES: Final = 4
LEVELS: Final = 127
"""Levels of each sign in `WireInt8`."""
NAMES: Final = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
LARGEST_FP32: Final = torch.finfo(torch.float32).max
CHUNK: Final = 1 << 18
"""Values per chunk, a megabyte: they are still in the cache when their rounding error is computed."""


class WireCodec(ABC):
    """A way to write fp32 values as bytes; the same values always give the same bytes."""

    name: str
    """Name in logs and configurations."""
    is_lossless = False

    @abstractmethod
    def num_bytes(self, num_values: int) -> int:
        """Length of the message of `num_values` values."""

    @abstractmethod
    def encode(self, values: Tensor) -> Tensor:
        """Encode contiguous fp32 `[n]` as uint8 `[num_bytes(n)]`, which may share the memory of `values`."""

    @abstractmethod
    def decode(self, data: Tensor, num_values: int) -> Tensor:
        """Decode a message to fp32 `[num_values]`, which may share its memory.

        Args:
            data: uint8 `[num_bytes(num_values)]`, contiguous, at any offset of a larger message.
            num_values: number of encoded values.
        """

    def pack(self, values: Tensor, data: Tensor) -> None:
        """Encode values, and replace them by their rounding errors (0 where that is not finite).

        Args:
            values: fp32 `[n]`.
            data: uint8 `[num_bytes(n)]`, overwritten; aligned for fp32.
        """
        for part, chunk in self._chunks(values, data):
            encoded = self.encode(part)
            chunk.copy_(encoded)
            part.sub_(self.decode(encoded, part.numel()))
            part.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def unpack(self, data: Tensor, values: Tensor) -> None:
        """Decode a packed message into `values`, fp32 `[n]`."""
        for part, encoded in self._chunks(values, data):
            part.copy_(self.decode(encoded, part.numel()))

    def add(self, data: Tensor, values: Tensor) -> None:
        """Decode a packed message and add it to `values`, fp32 `[n]`."""
        for part, encoded in self._chunks(values, data):
            part.add_(self.decode(encoded, part.numel()))

    def _chunks(self, values: Tensor, data: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        begin = 0
        for part in torch.split(values, CHUNK):
            end = begin + self.num_bytes(part.numel())
            yield part, data[begin:end]
            begin = end


class Cast(WireCodec):
    """Values in another type, rounded to the nearest (ties to even); in fp32, their own bytes without a copy.

    Finite values beyond the largest of the type (65,504 in fp16) are clipped to it, and error feedback sends
    the rest later. Infinities and NaN stay, so that every rank sees them. Other values change by at most
    2^-11 of themselves in fp16 (those below 2^-14 by up to 2^-25), and by 2^-8 in bf16.

    Args:
        dtype: `torch.float32`, `torch.float16` or `torch.bfloat16`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max
        self.name = NAMES[dtype]
        self.is_lossless = dtype is torch.float32

    def num_bytes(self, num_values: int) -> int:
        """See `WireCodec.num_bytes`."""
        return self._dtype.itemsize * num_values

    def encode(self, values: Tensor) -> Tensor:
        """See `WireCodec.encode`."""
        if self.is_lossless:
            return values.view(torch.uint8)
        # clipping drops infinities and NaN; adding them back is several times as fast as torch.where
        not_finite = values.sub(values.clamp(-LARGEST_FP32, LARGEST_FP32))
        saturated = not_finite.add_(values.clamp(-self._largest, self._largest))
        return saturated.to(self._dtype).view(torch.uint8)

    def decode(self, data: Tensor, num_values: int) -> Tensor:
        """See `WireCodec.decode`."""
        return _view(data, self._dtype).float()


class WireInt8(WireCodec):
    """A byte a value, and an fp32 scale for every block of 1,024 values, which comes first in the message.

    The scale is the block's largest magnitude / 127, and a value changes by half of that at most. A block of
    nothing but denormals becomes 0. A NaN or infinity turns its whole block into NaN, so that every rank sees
    it.
    """

    name = "int8"

    def num_bytes(self, num_values: int) -> int:
        """See `WireCodec.num_bytes`."""
        return SCALE_BYTES * _num_blocks(num_values) + num_values

    def encode(self, values: Tensor) -> Tensor:
        """See `WireCodec.encode`."""
        blocks = _blocks_of(values)
        # no smaller than a normal number: a denormal scale has too few digits to divide by
        scales = (blocks.abs().amax(dim=1) / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
        levels = (blocks / scales[:, None]).round_().clamp_(-LEVELS, LEVELS)
        # NaN has no level, but its scale is NaN too, and makes NaN of any level
        levels = levels.nan_to_num_(nan=0.0).to(torch.int8).view(-1)[: values.numel()]
        return torch.cat([scales.view(torch.uint8), levels.view(torch.uint8)])

    def decode(self, data: Tensor, num_values: int) -> Tensor:
        """See `WireCodec.decode`."""
        num_blocks = _num_blocks(num_values)
        scales, levels = torch.split(data, [SCALE_BYTES * num_blocks, num_values])
        blocks = _blocks_of(levels.view(torch.int8))
        return blocks.mul_(_view(scales, torch.float32)[:, None]).view(-1)[:num_values]


def _num_blocks(num_values: int) -> int:
    return -(-num_values // BLOCK)


def _blocks_of(values: Tensor) -> Tensor:
    """Copy values to fp32 `[blocks, BLOCK]`, the last block padded with zeros."""
    filled = torch.zeros(_num_blocks(values.numel()) * BLOCK, device=values.device)
    filled[: values.numel()] = values
    return filled.view(-1, BLOCK)


def _view(data: Tensor, dtype: torch.dtype) -> Tensor:
    """View bytes as numbers of `dtype`, or copy them where they are not aligned."""
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype)
