"""Index from ids to rows: a hash table with open addressing, vectorized over ids.

All ids of a batch are searched at once: each round looks into one slot for every undecided id, and most are
decided after the first. The index is rebuilt from the column of ids when rows were freed, or written from
outside.
"""

from typing import Final

import torch
from torch import Tensor

from dlrm.sharding.dynamic.hashing import mix

SLOTS_PER_ROW: Final = 2
"""Least slots per row, so that searches soon reach an empty slot, where they end."""
NOTHING: Final = -1


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
