"""TorchRec codecs that exchange pooled embeddings and their gradients in 16 or 8 bits.

`sharding.exchange_dtype` names the dtype, used forward and backward; sums over samples are made in fp32 after
decoding. Gradients of a mean over a batch are too small for fp16 and int8, so they travel multiplied by `s`,
a power of two, which rounds nothing (1 for embeddings). The error of a number `x` is at most:

- fp16: `2**-11 |x|`, or `2**-25 / s` if that is larger; beyond 65,504 / s, numbers are clamped to that.
- bf16: `2**-8 |x|`.
- Both keep NaN and infinities; numbers that `s` makes larger than fp32 count as infinite.
- int8: `r / 510 + 1e-8 / s`, with `r` the range of the embedding's numbers: 256 levels from the smallest to
  the largest, which travel along in fp32. If one number is not finite, all of that embedding become NaN.

FBGEMM's fp8 and MX4 are not offered. Fp8 does not exist on the CPU, and with a scale per row it takes as many
bytes as int8. MX4 is slow on the CPU, and TorchRec pads its groups forward only.
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
"""Bytes per int8 embedding for its step size and smallest number, both fp32."""
NARROWEST_INT8: Final = 16
"""Least number of columns for int8; with fewer, fp16 takes about as few bytes and rounds less."""


@dataclass(frozen=True, kw_only=True)
class ExchangeCodecs:
    """Codecs of TorchRec's exchanges of pooled embeddings, for tables of any width."""

    dtype: str
    """`fp16`, `bf16` or `int8`."""
    batch_size: int
    """Samples of a rank in one step, over whose mean the gradients are."""

    def used(self, width: int) -> str:
        """Return the dtype in which pieces of tables are sent: fp16 instead of int8 for a small `width`.

        All widths of the pieces are multiples of `width`.
        """
        return "fp16" if self.dtype == "int8" and width < NARROWEST_INT8 else self.dtype

    def value_bytes(self, width: int) -> float:
        """Bytes of a number while it travels."""
        return (width + INT8_TAIL_BYTES) / width if self.used(width) == "int8" else 2.0

    @property
    def gradient_scale(self) -> float:
        """Factor that gradients are multiplied by while they travel."""
        return 1.0 if self.dtype == "bf16" else 2.0 ** (self.batch_size - 1).bit_length()

    def registry(self, width: int) -> dict[str, QuantizedCommCodecs]:
        """Codecs as TorchRec's sharders take them; int8, which cannot be summed, is not for row-wise tables.

        TorchRec's own registry uses fp16 for bf16 on the CPU, which is not needed: nothing is summed while it
        travels. For `width` see `exchanged_width`.
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
    """FBGEMM's codec for numbers multiplied by a power of two, and divided by it again in fp32.

    FBGEMM's own `loss_scale` divides in fp16, where small numbers are lost again.
    """

    def __init__(self, kind: SparseType, scale: float = 1.0) -> None:
        super().__init__(kind)
        self._scale = scale

    def encode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Encode a tensor of any floating dtype."""
        numbers = input_tensor.float()
        return self._encode(numbers if self._scale == 1 else numbers * self._scale, ctx)

    def decode(self, input_tensor: Tensor, ctx: QuantizationContext | None = None) -> Tensor:
        """Decode to fp32."""
        numbers: Tensor = super().decode(input_tensor, ctx)
        return numbers if self._scale == 1 else numbers / self._scale

    def _encode(self, numbers: Tensor, ctx: QuantizationContext | None) -> Tensor:
        coded: Tensor = super().encode(numbers, ctx)
        return coded


class HalfCodec(ScaledCodec):
    """FBGEMM's fp16 and bf16, with infinities kept.

    FBGEMM turns infinity into the largest finite number, which would hide a diverged table from other ranks.
    """

    def _encode(self, numbers: Tensor, ctx: QuantizationContext | None) -> Tensor:
        """Encode to numbers of half the size."""
        coded = super()._encode(numbers, ctx)
        # on the CPU a cheap sum finds infinities; on a GPU reading it would stall
        if numbers.is_cuda or not bool(numbers.sum().isfinite()):
            coded = torch.where(numbers.isinf(), numbers.to(coded.dtype), coded)
        return coded


class Int8Codec(ScaledCodec):
    """FBGEMM's int8 with one scale per embedding instead of every 32 numbers, and with NaN kept.

    Rows of 32 do not divide an odd number of samples of 16 columns, and then the exchange fails. FBGEMM turns
    NaN into ordinary numbers, which would hide a diverged table from other ranks. FBGEMM adds 1e-8 to the
    range of a row, so that small gradients need a scale.

    Args:
        width: numbers of a row, a multiple of 4 that divides the width of every piece of a table.
        scale: as for `ScaledCodec`.
    """

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__(SparseType.INT8, scale)
        self._width = width

    def create_context(self) -> QuantizationContext:
        """Context of one exchange, which carries the width to FBGEMM."""
        return QuantizationContext(row_dim=self._width)

    def _encode(self, numbers: Tensor, ctx: QuantizationContext | None) -> Tensor:
        """Encode rows to `width + 8` uint8 each, flat."""
        coded = super()._encode(numbers, ctx)
        steps_and_smallest = coded.view(torch.float32).view(-1, self._width // 4 + 2)[:, -2:]
        # a row sum propagates NaN and infinity, and takes a tenth of the time of isfinite on each number
        is_finite = numbers.view(-1, self._width).sum(1, keepdim=True).isfinite()
        steps_and_smallest.masked_fill_(~is_finite, torch.nan)
        return coded


def exchanged_width(plan: Mapping[str, ParameterSharding]) -> int:
    """Largest number of columns that divides the width of every piece of the sharded tables in `plan`.

    Returns 0 if all tables are replicated.
    """
    pieces = [
        piece
        for sharding in plan.values()
        if sharding.sharding_type != ShardingType.DATA_PARALLEL.value
        for piece in sharding.sharding_spec.shards
    ]
    return math.gcd(*(piece.shard_sizes[1] for piece in pieces))
