"""From ids to rows: a hash table with open addressing, without a loop over ids.

All ids of a batch are looked for at once: each round looks into one slot for every id that is not decided
yet, and most are after the first. The index is derived from the column of ids, and made anew when rows were
written from outside or freed.
"""

from typing import Final

import torch
from torch import Tensor

from dlrm.sharding.dynamic.hashing import mix

SLOTS_PER_ROW: Final = 2
"""At least: so that some slot is empty, where a search ends, and soon."""
NOTHING: Final = -1


class IdIndex:
    """Finds rows by their ids.

    Args:
        ids: int64 `[capacity]`, the column of the table, live; only those of indexed rows matter.
        rows: to index, int64, their ids all different.
    """

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        self._ids = ids
        num_slots = 1 << (SLOTS_PER_ROW * ids.numel() - 1).bit_length()
        self._mask = num_slots - 1
        dtype = torch.int32 if ids.numel() < 2**31 else torch.int64
        self._slots = torch.full((num_slots,), NOTHING, dtype=dtype, device=ids.device)
        self.add(rows)

    def find(self, ids: Tensor) -> Tensor:
        """Row of each id, int64 `[n]`; -1: it has none. Ids may come several times."""
        slots = mix(ids) & self._mask
        found = self._rows_at(slots)
        open_ = self._is_other(found, ids).nonzero().squeeze(1)
        while open_.numel():
            slots[open_] = (slots[open_] + 1) & self._mask
            found[open_] = self._rows_at(slots[open_])
            open_ = open_[self._is_other(found[open_], ids[open_])]
        return found

    def add(self, rows: Tensor) -> None:
        """Index more rows, int64; their ids are in the column, all different, and none has a row yet."""
        slots = mix(self._ids[rows]) & self._mask
        while rows.numel():
            free = self._slots[slots] == NOTHING
            # of several rows for one slot one stays, whichever, for searches find all of them
            self._slots[slots[free]] = rows[free].to(self._slots.dtype)
            left = self._rows_at(slots) != rows
            rows, slots = rows[left], (slots[left] + 1) & self._mask

    def _rows_at(self, slots: Tensor) -> Tensor:
        return self._slots[slots].to(torch.int64)

    def _is_other(self, rows: Tensor, ids: Tensor) -> Tensor:
        """Where a slot holds another id than the one that is looked for."""
        return (rows != NOTHING) & (self._ids[rows.clamp(min=0)] != ids)
