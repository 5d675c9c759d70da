"""Rows of a shard in host memory, on their way to a row file or back."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a shard, all their columns."""

    first_row: int
    """Row id of the first one."""
    ids: Tensor | None
    """Row ids, int64 `[n]`, ascending without duplicates; None: contiguous from `first_row` on."""
    columns: Mapping[str, Tensor]
    """`weights` and optimizer states by name, `[n]` or `[n, cols]`, on the CPU."""

    def __len__(self) -> int:
        return self.columns["weights"].shape[0]

    @property
    def last_row(self) -> int:
        """Row id of the last one."""
        return self.first_row + len(self) - 1 if self.ids is None else int(self.ids[-1])

    def fault(self, begin: int, end: int) -> str | None:
        """What is wrong with these rows, one at least, that should ascend from `begin` to before `end`."""
        if self.ids is not None:
            if self.ids.dtype != torch.int64 or self.ids.shape != (len(self),):
                return f"{len(self)} int64 ids are needed, not {self.ids.dtype} {list(self.ids.shape)}"
            if self.ids[0] != self.first_row or not (self.ids[1:] > self.ids[:-1]).all():
                return f"their ids do not ascend from row {self.first_row} on"
        if self.first_row < begin or self.last_row >= end:
            return f"rows {self.first_row} to {self.last_row} are not all among {begin} to {end - 1}"
        return None
