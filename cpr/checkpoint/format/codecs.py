"""Codecs of the weights in a row file: unchanged, cast to another float type, or quantised row by row.

Only weights are encoded; optimizer states are stored unchanged. A codec measures its error by decoding what
it has just encoded, because a bound says little about the rows of a trained table.
"""

import math
from abc import ABC, abstractmethod
from typing import Final

import torch
from torch import Tensor

_BLOCK_WEIGHTS: Final = 2**17
"""Weights encoded at a time: with their codes they fit a core's cache."""


class Codec:
    """Encodes the weights of rows for storage, measures the error, and decodes them; `exact` keeps all."""

    name = "exact"

    def stored_as(self, dtype: torch.dtype, num_cols: int) -> tuple[torch.dtype, int]:
        """Data type and width of a stored row; uint8 means bytes that only the codec can decode."""
        return dtype, num_cols

    def encode(self, weights: Tensor) -> tuple[Tensor, float]:
        """Encode rows of weights, `[rows, cols]` of the table's dtype on the CPU.

        Returns:
            The stored form, `[rows, stored width]`, and the largest absolute error of a weight, 0.0 for none.

        Raises:
            ValueError: the codec cannot represent a value; names the row and what to do.
        """
        return weights, 0.0

    def decode(self, stored: Tensor, dtype: torch.dtype, num_cols: int) -> Tensor:
        """Decode to the table's form, `[rows, num_cols]` of `dtype`. May return a view of `stored`."""
        return stored


class _Lossy(Codec, ABC):
    """Base of codecs that change weights; encodes and measures in blocks that fit a core's cache."""

    def encode(self, weights: Tensor) -> tuple[Tensor, float]:
        num_rows, num_cols = weights.shape
        stored_dtype, width = self.stored_as(weights.dtype, num_cols)
        stored, max_error = torch.empty(num_rows, width, dtype=stored_dtype), 0.0
        rows_per_block = max(1, _BLOCK_WEIGHTS // num_cols)
        for begin in range(0, num_rows, rows_per_block):
            block = weights[begin : begin + rows_per_block]
            codes = self._encode_block(block)
            error = _max_error(block, self.decode(codes, block.dtype, num_cols))
            if not math.isfinite(error):
                codes, error = self._encode_unusual(block, codes, begin)
            stored[begin : begin + rows_per_block] = codes
            max_error = max(max_error, error)
        return stored, max_error

    @abstractmethod
    def _encode_block(self, weights: Tensor) -> Tensor:
        """Encode a block of rows."""

    @abstractmethod
    def _encode_unusual(self, weights: Tensor, codes: Tensor, first: int) -> tuple[Tensor, float]:
        """Encode a block again in which an error was infinite or NaN; `first` is the number of its first row.

        Returns the stored form and the largest error; raises ValueError if it cannot represent a value.
        """


class _Cast(_Lossy):
    """Casts weights to another float type.

    Finite values beyond its range become its largest value with their sign, which `max_error` shows;
    infinities and NaN stay unchanged.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def stored_as(self, dtype: torch.dtype, num_cols: int) -> tuple[torch.dtype, int]:
        return self._dtype, num_cols

    def encode(self, weights: Tensor) -> tuple[Tensor, float]:
        if torch.promote_types(weights.dtype, self._dtype) == self._dtype:
            return weights.to(self._dtype), 0.0
        return super().encode(weights)

    def decode(self, stored: Tensor, dtype: torch.dtype, num_cols: int) -> Tensor:
        return stored.to(dtype)

    def _encode_block(self, weights: Tensor) -> Tensor:
        return weights.to(self._dtype)

    def _encode_unusual(self, weights: Tensor, codes: Tensor, first: int) -> tuple[Tensor, float]:
        limit, finite = torch.finfo(self._dtype).max, weights.isfinite()
        codes = torch.where(finite, weights.clamp(-limit, limit).to(self._dtype), codes)
        if not finite.any():
            return codes, 0.0
        return codes, _max_error(weights[finite], codes[finite].to(weights.dtype))


class _Quantised(_Lossy):
    """Row-wise quantisation by FBGEMM: small integers with a scale and a bias for each row.

    8 bits: one byte per weight, then scale and bias as float32; a row of equal values is exact.
    4 bits: half a byte per weight, the lower half first, then scale and bias as float16; a row of equal
    values is exact as far as float16 can hold the value.

    The integers cannot represent NaN and infinity, and a row that holds one would lose its other weights too,
    so such a row is refused.

    Args:
        bits: 8 or 4.
    """

    def __init__(self, bits: int) -> None:
        import fbgemm_gpu  # noqa: F401, PLC0415 -- registers the operators; other codecs do not need it

        self.name, self._bits = f"int{bits}", bits

    def stored_as(self, dtype: torch.dtype, num_cols: int) -> tuple[torch.dtype, int]:
        return torch.uint8, num_cols + 8 if self._bits == 8 else -(-num_cols // 4) * 2 + 4

    def decode(self, stored: Tensor, dtype: torch.dtype, num_cols: int) -> Tensor:
        operators = torch.ops.fbgemm
        if self._bits == 8:
            weights: Tensor = operators.Fused8BitRowwiseQuantizedToFloat(stored)
        else:
            weights = operators.FusedNBitRowwiseQuantizedSBHalfToFloat(stored, 4)
        return weights[:, :num_cols].to(dtype)

    def _encode_block(self, weights: Tensor) -> Tensor:
        weights, operators = weights.float(), torch.ops.fbgemm
        if self._bits == 8:
            stored: Tensor = operators.FloatToFused8BitRowwiseQuantized(weights)
        else:
            # FBGEMM needs a multiple of four weights; repeating the last one changes neither scale nor bias.
            if missing := -weights.shape[1] % 4:
                weights = torch.cat([weights, weights[:, -1:].expand(-1, missing)], dim=1)
            stored = operators.FloatToFusedNBitRowwiseQuantizedSBHalf(weights, 4)
        return stored

    def _encode_unusual(self, weights: Tensor, codes: Tensor, first: int) -> tuple[Tensor, float]:
        decoded = self.decode(codes, weights.dtype, weights.shape[1])
        row = int((weights - decoded).isfinite().all(dim=1).logical_not().nonzero()[0])
        low, high = weights[row].min().item(), weights[row].max().item()
        raise ValueError(
            f"{self.name} cannot hold number {first + row} of these rows (values from {low:g} to {high:g}): "
            "save with codec 'exact' or 'fp32', and look at why training came to such values"
        )


_CASTS: Final = {"fp32": torch.float32, "fp16": torch.float16}
_BITS: Final = {"int8": 8, "int4": 4}
CODECS: Final = ("exact", *_CASTS, *_BITS)


def codec_named(name: str) -> Codec:
    """Make the codec of this name, one of `CODECS`; raises ValueError for any other."""
    if name in _CASTS:
        return _Cast(name, _CASTS[name])
    if name in _BITS:
        return _Quantised(_BITS[name])
    if name == "exact":
        return Codec()
    raise ValueError(f"there is no codec {name!r}; choose one of {', '.join(CODECS)}")


def _max_error(weights: Tensor, decoded: Tensor) -> float:
    """Largest absolute difference, in float32 or wider so that it is not rounded to the table's dtype."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    least, most = torch.aminmax(weights.to(wide) - decoded.to(wide))  # one pass; NaN comes through
    return max(-least.item(), most.item())
