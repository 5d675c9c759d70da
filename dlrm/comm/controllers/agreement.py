"""Numbers that all ranks agree on, to the bit: what decisions that choose a collective are made from."""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class Agree(Protocol):
    """Adds numbers over all ranks, which call it together."""

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""

    def __call__(self, values: Tensor) -> list[float]:
        """The sums over ranks, the same bits on all of them.

        Args:
            values: `[n]`, of this rank; NaN and infinity go into the sums.
        """


class SumOverRanks:
    """Agreement in a process group: everybody gathers everybody's numbers, and adds them in order of rank.

    Nothing is decided then by how a backend rounds in its all-reduce, or in which order it adds.

    Args:
        device: on which the group's backend exchanges tensors.
        group: default: all ranks.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return dist.get_world_size(self._group)

    def __call__(self, values: Tensor) -> list[float]:
        """The sums over ranks; see `Agree`. On a GPU, it waits for what computes `values`."""
        mine = values.to(self._device, torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(gathered, mine, group=self._group)
        return [sum(column) for column in zip(*torch.stack(gathered).tolist(), strict=True)]
