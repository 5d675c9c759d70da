"""How the weights in a row file are stored: as they are, as another float type, or quantised row by row.

Only weights are ever encoded; optimizer states are stored as they are. A codec measures the error that it
makes at the moment it makes it, by decoding what it has just encoded, because a bound says little about
the rows of a trained table.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Encoded:
    """Weights as they are stored."""

    stored: Tensor
    """`[rows, stored width]`."""
    max_error: float
    """Largest absolute difference between a weight and what decoding makes of it; 0.0 for no rows."""


class Codec(Protocol):
    """One way to store weights."""

    name: str
    """As manifests name it."""

    def stored_as(self, dtype: torch.dtype, num_cols: int) -> tuple[torch.dtype, int]:
        """Data type and width of a stored row; uint8 stands for bytes that only the codec understands.

        Args:
            dtype: of the table.
            num_cols: weights in a row.
        """

    def encode(self, weights: Tensor) -> Encoded:
        """Encode rows.

        Args:
            weights: `[rows, cols]`, the table's dtype, on the CPU.

        Raises:
            ValueError: the codec has no room for a value; says which row and what to do.
        """

    def decode(self, stored: Tensor, dtype: torch.dtype, num_cols: int) -> Tensor:
        """Rows as the table holds them: `[rows, num_cols]` of `dtype`. May be a view of `stored`."""


class Exact:
    """Keeps the table's own dtype, bit for bit."""

    name = "exact"

    def stored_as(self, dtype: torch.dtype, num_cols: int) -> tuple[torch.dtype, int]:
        """See `Codec.stored_as`."""
        return dtype, num_cols

    def encode(self, weights: Tensor) -> Encoded:
        """See `Codec.encode`; copies nothing."""
        return Encoded(weights, 0.0)

    def decode(self, stored: Tensor, dtype: torch.dtype, num_cols: int) -> Tensor:
        """See `Codec.decode`; copies nothing."""
        return stored


class Cast:
    """Stores another float type.

    Finite values beyond its range become its largest value with their sign, which `max_error` shows;
    infinities and NaN stay what they are.

    Args:
        name: as manifests name it.
        dtype: what is stored.
    """

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self._dtype = dtype

    def stored_as(self, dtype: torch.dtype, num_cols: int) -> tuple[torch.dtype, int]:
        """See `Codec.stored_as`."""
        return self._dtype, num_cols

    def encode(self, weights: Tensor) -> Encoded:
        """See `Codec.encode`; never raises."""
        stored = weights.to(self._dtype)
        if torch.promote_types(weights.dtype, self._dtype) == self._dtype:
            return Encoded(stored, 0.0)
        beyond = stored.isinf() & weights.isfinite()
        if beyond.any():
            limit = torch.finfo(self._dtype).max
            stored = torch.where(beyond, weights.clamp(-limit, limit).to(self._dtype), stored)
        errors = _errors(weights, stored.to(weights.dtype))
        return Encoded(stored, _largest(errors.nan_to_num_(nan=0.0)))  # inf - inf and NaN - NaN: kept

    def decode(self, stored: Tensor, dtype: torch.dtype, num_cols: int) -> Tensor:
        """See `Codec.decode`."""
        return stored.to(dtype)


class _Rowwise(ABC):
    """Integers of few bits with a scale and a bias for each row, by FBGEMM's operators.

    They have no code for NaN and infinity, and a row that holds one would lose its other weights too, so such
    a row is refused.
    """

    name: str

    def __init__(self) -> None:
        import fbgemm_gpu  # noqa: F401, PLC0415 -- registers the operators; other codecs do without it

    def stored_as(self, dtype: torch.dtype, num_cols: int) -> tuple[torch.dtype, int]:
        """See `Codec.stored_as`."""
        return torch.uint8, self._width(num_cols)

    def encode(self, weights: Tensor) -> Encoded:
        """See `Codec.encode`.

        Raises:
            ValueError: a row holds NaN or infinity, or spans more than the scale and bias can express.
        """
        if not weights.numel():
            return Encoded(torch.empty(0, self._width(weights.shape[1]), dtype=torch.uint8), 0.0)
        stored = self._quantise(weights.float())
        errors = _errors(weights, self.decode(stored, weights.dtype, weights.shape[1]))
        if not errors.isfinite().all():
            row = int((~errors.isfinite()).any(dim=1).nonzero()[0])
            raise ValueError(
                f"{self.name} cannot hold row {row} of these (smallest value {weights[row].min().item():g}, "
                f"largest {weights[row].max().item():g}): save with codec 'exact' or 'fp32', and look at why "
                "training came to such values"
            )
        return Encoded(stored, _largest(errors))

    def decode(self, stored: Tensor, dtype: torch.dtype, num_cols: int) -> Tensor:
        """See `Codec.decode`."""
        return self._dequantise(stored)[:, :num_cols].to(dtype)

    @abstractmethod
    def _width(self, num_cols: int) -> int:
        """Bytes of a stored row."""

    @abstractmethod
    def _quantise(self, weights: Tensor) -> Tensor: ...

    @abstractmethod
    def _dequantise(self, stored: Tensor) -> Tensor: ...


class Int8(_Rowwise):
    """One byte a weight, then scale and bias as float32: `weight = bias + scale * byte`.

    A row of equal values is exact.
    """

    name = "int8"

    def _width(self, num_cols: int) -> int:
        return num_cols + 8

    def _quantise(self, weights: Tensor) -> Tensor:
        stored: Tensor = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(weights)
        return stored

    def _dequantise(self, stored: Tensor) -> Tensor:
        weights: Tensor = torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(stored)
        return weights


class Int4(_Rowwise):
    """Half a byte a weight, the lower half first, then scale and bias as float16.

    A row of equal values is exact as far as float16 can hold the value. Rows of odd width are stored with
    their last weight twice, which changes neither scale nor bias.
    """

    name = "int4"

    def _width(self, num_cols: int) -> int:
        return (num_cols + 1) // 2 + 4

    def _quantise(self, weights: Tensor) -> Tensor:
        if weights.shape[1] % 2:
            weights = torch.cat([weights, weights[:, -1:]], dim=1)
        stored: Tensor = torch.ops.fbgemm.FloatToFusedNBitRowwiseQuantizedSBHalf(weights, 4)
        return stored

    def _dequantise(self, stored: Tensor) -> Tensor:
        weights: Tensor = torch.ops.fbgemm.FusedNBitRowwiseQuantizedSBHalfToFloat(stored, 4)
        return weights


CODECS: Final = ("exact", "fp32", "fp16", "int8", "int4")
"""Their names."""


def codec_named(name: str) -> Codec:
    """The codec that a manifest or a user names.

    Raises:
        ValueError: there is none of this name.
    """
    match name:
        case "exact":
            return Exact()
        case "fp32":
            return Cast(name, torch.float32)
        case "fp16":
            return Cast(name, torch.float16)
        case "int8":
            return Int8()
        case "int4":
            return Int4()
    raise ValueError(f"there is no codec {name!r}; choose one of {', '.join(CODECS)}")


def _errors(weights: Tensor, decoded: Tensor) -> Tensor:
    """Absolute differences, in float32 or wider, so that the difference of two halves is not rounded."""
    wide = torch.promote_types(weights.dtype, torch.float32)
    return (weights.to(wide) - decoded.to(wide)).abs_()


def _largest(errors: Tensor) -> float:
    return errors.max().item() if errors.numel() else 0.0
