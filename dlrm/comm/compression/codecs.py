"""Codecs: how many bytes a value of the gradient takes on the wire, and at what error.

A codec makes a message of bytes from fp32 values and values from the bytes; its length depends only on the
number of values, so that ranks know it without asking. Whoever sends keeps the difference between a value
and what its message decodes to (error feedback), so that what a codec rounds off is late, not lost.
"""

from typing import Final, Protocol

import torch
from torch import Tensor

BLOCK: Final = 1024
"""Values that share a scale in `WireInt8`."""
SCALE_BYTES: Final = 4
LEVELS: Final = 127
"""Of each sign in `WireInt8`."""
HALVES: Final = {torch.float16: "fp16", torch.bfloat16: "bf16"}
LARGEST_FP32: Final = torch.finfo(torch.float32).max


class WireCodec(Protocol):
    """One way to write fp32 values as bytes. The same values give the same bytes, always."""

    @property
    def name(self) -> str:
        """Short, for tables and configurations."""

    def num_bytes(self, num_values: int) -> int:
        """Length of the message of so many values."""

    def encode(self, values: Tensor) -> Tensor:
        """The message, uint8 `[num_bytes(n)]`.

        It may share its memory with `values`: send it before they change.

        Args:
            values: fp32 `[n]`, contiguous.
        """

    def decode(self, data: Tensor, num_values: int) -> Tensor:
        """The values of a message, fp32 `[num_values]`; they may share its memory.

        Args:
            data: uint8 `[num_bytes(num_values)]`, contiguous; it may begin anywhere in a larger message.
            num_values: that were encoded.
        """


class Plain:
    """fp32 as it is: no error, no copy."""

    name = "fp32"

    def num_bytes(self, num_values: int) -> int:
        """See `WireCodec.num_bytes`."""
        return 4 * num_values

    def encode(self, values: Tensor) -> Tensor:
        """See `WireCodec.encode`."""
        return values.view(torch.uint8)

    def decode(self, data: Tensor, num_values: int) -> Tensor:
        """See `WireCodec.decode`."""
        return _view(data, torch.float32)


class Half:
    """Two bytes a value, rounded to the nearest (ties to even).

    Finite values beyond the largest of the type (65,504 in fp16) become that one instead of infinity: what is
    cut off is left to error feedback. Infinities and NaN stay what they are, so that every rank sees them.
    Other values change by at most 2^-11 of themselves in fp16 (those below 2^-14 by up to 2^-25), and by 2^-8
    in bf16, which covers the range of fp32.

    Args:
        dtype: `torch.float16` or `torch.bfloat16`.

    Raises:
        ValueError: another dtype.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        if dtype not in HALVES:
            raise ValueError(f"{dtype} is no half precision: choose torch.float16 or torch.bfloat16")
        self._dtype = dtype
        self._largest = torch.finfo(dtype).max

    @property
    def name(self) -> str:
        """`fp16` or `bf16`."""
        return HALVES[self._dtype]

    def num_bytes(self, num_values: int) -> int:
        """See `WireCodec.num_bytes`."""
        return 2 * num_values

    def encode(self, values: Tensor) -> Tensor:
        """See `WireCodec.encode`."""
        # what is not finite is kept by adding it again, which is several times as fast as torch.where
        not_finite = values.sub(values.clamp(-LARGEST_FP32, LARGEST_FP32))
        saturated = not_finite.add_(values.clamp(-self._largest, self._largest))
        return saturated.to(self._dtype).view(torch.uint8)

    def decode(self, data: Tensor, num_values: int) -> Tensor:
        """See `WireCodec.decode`."""
        return _view(data, self._dtype).float()


class WireInt8:
    """A byte a value and a scale for every 1,024 values (the last ones may be fewer).

    The scale is the largest magnitude of its values / 127, and a value changes by half of that at most: 1/254
    of the largest among its neighbours. A block of nothing but denormals becomes 0. A NaN or an infinity
    makes NaN of its whole block, so that every rank sees it. In a message the scales come first.
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
        # NaN has no level; its scale is NaN too, and decodes to it
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
    """A copy in fp32 `[blocks, BLOCK]`, the last block filled up with zeros."""
    filled = torch.zeros(_num_blocks(values.numel()) * BLOCK, device=values.device)
    filled[: values.numel()] = values
    return filled.view(-1, BLOCK)


def _view(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as numbers of `dtype`; copied where they lie across the numbers' boundaries."""
    aligned = data if data.storage_offset() % dtype.itemsize == 0 else data.clone()
    return aligned.view(dtype)
