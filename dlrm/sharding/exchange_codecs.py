"""Pooled embeddings and their gradients in fewer bytes on their way between ranks, through TorchRec's codecs.

`sharding.exchange_dtype` names one. Forward and backward take the same; sums over samples are made in fp32
after the way back. How far a number `x` may come out from what went in, with `s` the factor by which
gradients travel larger (in fp16 and int8 those of a mean over a batch are too small otherwise; a power of
two, which rounds nothing) and 1 for embeddings:

- fp16: `2**-11 |x|`, or `2**-25 / s` where that is larger. Beyond 65,504 / s it comes out as that.
- bf16: `2**-8 |x|`.
- Both: NaN and infinities stay what they are, and what `s` makes larger than fp32 has counts as infinite.
- int8: `r / 510 + 1e-8 / s`, with `r` the range of the embedding's numbers: 256 levels from its smallest to
  its largest, which travel along in fp32. Where one number is not finite, all of that embedding become NaN.

FBGEMM's fp8 and MX4 are not offered. Fp8 does not exist on the CPU, and with a scale for each row it takes
the bytes of int8; MX4 is slow there, and TorchRec pads what its groups do not divide on the way there only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from fbgemm_gpu.quantize_comm import QuantizationContext, QuantizedCommCodec
from fbgemm_gpu.split_embedding_configs import SparseType
from torch import Tensor
from torchrec.distributed.types import CommOp, ParameterSharding, QuantizedCommCodecs, ShardingType

INT8_TAIL_BYTES: Final = 8
"""Of an embedding in int8: its step and its smallest number, in fp32."""
NARROWEST_INT8: Final = 16
"""Columns; with fewer than that, fp16 takes about as few bytes and rounds less."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCodecs:
    """Codecs of TorchRec's exchanges of pooled embeddings, for tables of any width."""

    dtype: str
    """`fp16`, `bf16` or `int8`."""
    batch_size: int
    """Samples of a rank in one step, over whose mean gradients are."""

    def used(self, width: int) -> str:
        """What pieces of tables with multiples of `width` columns travel in."""
        return "fp16" if self.dtype == "int8" and width < NARROWEST_INT8 else self.dtype

    def value_bytes(self, width: int) -> float:
        """Of a number on its way."""
        return (width + INT8_TAIL_BYTES) / width if self.used(width) == "int8" else 2.0

    @property
    def gradient_scale(self) -> float:
        """What gradients are multiplied by while they travel."""
        return 1.0 if self.dtype == "bf16" else 2.0 ** (self.batch_size - 1).bit_length()

    def registry(self, width: int) -> dict[str, QuantizedCommCodecs]:
        """As TorchRec's sharders take it; int8, which cannot be summed, is not for row-wise tables.

        TorchRec's own registry takes fp16 for bf16 on the CPU. No need: nothing is summed on its way there.

        Args:
            width: see `exchanged_width`.
        """
        used, scale = self.used(width), self.gradient_scale
        all_to_all = CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL.name
        reduce_scatter = CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER.name
        if used == "int8":
            return {all_to_all: QuantizedCommCodecs(Int8Codec(width), Int8Codec(width, scale))}
        kind = SparseType(used)
        codecs = QuantizedCommCodecs(HalfCodec(kind), HalfCodec(kind, scale))
        return {all_to_all: codecs, reduce_scatter: codecs}


class ScaledCodec(QuantizedCommCodec):  # type: ignore[misc]
    """FBGEMM's codec of numbers that travel times a power of two, and are divided by it again in fp32.

    Its own `loss_scale` is divided by in fp16, where small numbers lose again what they were spared.

    Args:
        kind: of numbers on their way.
        scale: by which they are multiplied.
    """

    def __init__(self, kind: SparseType, scale: float = 1.0) -> None:
        super().__init__(kind)
        self._scale = scale

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """What travels; takes tensors of any floating dtype."""
        numbers = input_tensor.float()
        return self._encode(numbers if self._scale == 1 else numbers * self._scale, ctx)

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """The numbers, fp32."""
        numbers: Tensor = super().decode(input_tensor, ctx)
        return numbers if self._scale == 1 else numbers / self._scale

    def _encode(self, numbers: Tensor, ctx: QuantizationContext | None) -> Tensor:
        coded: Tensor = super().encode(numbers, ctx)
        return coded


class HalfCodec(ScaledCodec):
    """FBGEMM's fp16 and bf16, and infinities.

    FBGEMM makes ordinary numbers of an infinity, the largest there are, so that a table that diverged would
    look well from other ranks.
    """

    def _encode(self, numbers: Tensor, ctx: QuantizationContext | None) -> Tensor:
        """As many numbers of half the size."""
        coded = super()._encode(numbers, ctx)
        # a sum tells in a fraction of the time of the rest; but who asks for it waits for a GPU
        if numbers.is_cuda or not bool(numbers.sum().isfinite()):
            coded = torch.where(numbers.isinf(), numbers.to(coded.dtype), coded)
        return coded


class Int8Codec(ScaledCodec):
    """FBGEMM's int8, with a scale for each embedding instead of every 32 numbers, and NaN.

    Rows of 32 do not divide what an odd number of samples has in 16 columns, and then the exchange fails.
    FBGEMM makes ordinary numbers of a NaN, so that a table that diverged would look well from other ranks.

    Args:
        width: numbers of a row, a multiple of 4 that divides the width of every piece of a table.
        scale: as for `ScaledCodec`. FBGEMM adds 1e-8 to the range of a row, which small ones do not bear.
    """

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__(SparseType.INT8, scale)
        self._width = width

    def create_context(self) -> QuantizationContext:
        """Of one exchange."""
        return QuantizationContext(row_dim=self._width)

    def _encode(self, numbers: Tensor, ctx: QuantizationContext | None) -> Tensor:
        """Rows of `width + 8` uint8, flat."""
        coded = super()._encode(numbers, ctx)
        steps_and_smallest = coded.view(torch.float32).view(-1, self._width // 4 + 2)[:, -2:]
        # a sum passes a NaN or an infinity on, in a tenth of the time that asking each number takes
        is_finite = numbers.view(-1, self._width).sum(1, keepdim=True).isfinite()
        steps_and_smallest.masked_fill_(~is_finite, torch.nan)
        return coded


def exchange_codecs(dtype: str, batch_size: int) -> ExchangeCodecs | None:
    """Codecs behind `sharding.exchange_dtype`; None: what is exchanged travels as it is computed.

    Args:
        dtype: its value.
        batch_size: samples of a rank in one step.
    """
    return None if dtype == "fp32" else ExchangeCodecs(dtype=dtype, batch_size=batch_size)


def exchanged_width(plan: Mapping[str, ParameterSharding]) -> int:
    """The largest number of columns that divides the width of every piece of a table that is not replicated.

    Args:
        plan: of the tables of one collection.

    Returns:
        0 if all are replicated.
    """
    pieces = [
        piece
        for sharding in plan.values()
        if sharding.sharding_type != ShardingType.DATA_PARALLEL.value
        for piece in sharding.sharding_spec.shards
    ]
    return math.gcd(*(piece.shard_sizes[1] for piece in pieces))
