"""Hashes and initial values that depend on ids alone: the same on every rank, device and run."""

import hashlib
from typing import Final

import torch
from torch import Tensor

GOLDEN: Final = 0x9E3779B97F4A7C15
FRACTION_BITS: Final = 24
"""Bits of a float32's fraction."""


def mix(numbers: Tensor) -> Tensor:
    """Hash int64 numbers of any shape by SplitMix64's finalizer, a bijection."""
    mixed = (numbers ^ _shifted(numbers, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ _shifted(mixed, 31)


def initial_values(ids: Tensor, columns: int, bound: float, seed: int, table: str) -> Tensor:
    """Uniform values in [-bound, bound) from seed, table name and id alone.

    Float32 `[n, columns]` for ids `[n]`.
    """
    digest = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    keys = mix(ids ^ int.from_bytes(digest[:8], "little", signed=True))
    steps = torch.arange(1, columns + 1, device=ids.device) * _signed(GOLDEN)
    words = _shifted(mix(keys.unsqueeze(1) + steps), 64 - FRACTION_BITS)
    return words.to(torch.float32).mul_(2.0 ** (1 - FRACTION_BITS) * bound).sub_(bound)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; PyTorch's shift fills with the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
