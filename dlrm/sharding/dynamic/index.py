"""Index from ids to rows: a hash table with open addressing, vectorized over ids.

All ids of a batch are searched at once: each round looks into one slot for every undecided id, and most are
decided after the first. The index is rebuilt from the column of ids when rows were freed, or written from
outside. Hashes and initial values depend on ids alone, and are the same on every rank, device and run.
"""

import hashlib
from typing import Final

import torch
from torch import Tensor

SLOTS_PER_ROW: Final = 2
"""Least slots per row, so that searches soon reach an empty slot, where they end."""
NOTHING: Final = -1

GOLDEN: Final = 0x9E3779B97F4A7C15
FRACTION_BITS: Final = 24
"""Bits of a float32's fraction."""


class IdIndex:
    """Finds rows by their ids, which are in the live column `ids`, int64 `[capacity]`.

    Indexed ids must differ.
    """

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        self._ids = ids
        num_slots = 1 << (SLOTS_PER_ROW * ids.numel() - 1).bit_length()
        self._mask = num_slots - 1
        dtype = torch.int32 if ids.numel() < 2**31 else torch.int64
        self._slots = torch.full((num_slots,), NOTHING, dtype=dtype, device=ids.device)
        self.add(rows)

    def find(self, ids: Tensor) -> Tensor:
        """Row of each id, int64 `[n]`, or -1 if it has none; ids may repeat."""
        slots = mix(ids) & self._mask
        found = self._rows_at(slots)
        open_ = self._is_other(found, ids).nonzero().squeeze(1)
        while open_.numel():
            slots[open_] = (slots[open_] + 1) & self._mask
            found[open_] = self._rows_at(slots[open_])
            open_ = open_[self._is_other(found[open_], ids[open_])]
        return found

    def add(self, rows: Tensor) -> None:
        """Index more rows, int64, whose ids are in the column, all different and not indexed yet."""
        slots = mix(self._ids[rows]) & self._mask
        while rows.numel():
            free = self._slots[slots] == NOTHING
            # rows that lost the slot to another row try the next one, as searches do
            self._slots[slots[free]] = rows[free].to(self._slots.dtype)
            left = self._rows_at(slots) != rows
            rows, slots = rows[left], (slots[left] + 1) & self._mask

    def _rows_at(self, slots: Tensor) -> Tensor:
        return self._slots[slots].to(torch.int64)

    def _is_other(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Where a slot holds another id than the searched one."""
        return (rows != NOTHING) & (self._ids[rows.clamp(min=0)] != ids)


def mix(numbers: Tensor) -> Tensor:
    """Hash int64 numbers of any shape by SplitMix64's finalizer, a bijection."""
    mixed = (numbers ^ _shifted(numbers, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return mixed ^ _shifted(mixed, 31)


def initial_values(ids: Tensor, columns: int, bounds: tuple[float, float], seed: int, table: str) -> Tensor:
    """Uniform values from the first of `bounds` to below the second, from seed, table name and id alone.

    Float32 `[n, columns]` for ids `[n]`.
    """
    digest = hashlib.sha256(f"{seed}/{table}".encode()).digest()
    keys = mix(ids ^ int.from_bytes(digest[:8], "little", signed=True))
    steps = torch.arange(1, columns + 1, device=ids.device) * _signed(GOLDEN)
    words = _shifted(mix(keys.unsqueeze(1) + steps), 64 - FRACTION_BITS)
    low, high = bounds
    return words.to(torch.float32).mul_(2.0**-FRACTION_BITS * (high - low)).add_(low)


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; PyTorch's shift fills with the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
