"""Measurements for controllers: energies of vectors, sums and step times agreed by ranks, smoothed values."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

SMOOTHED_STEPS: Final = 25
"""Window of SelSync (arXiv 2307.07950); GraVAC (arXiv 2305.12201) smooths likewise, here as long."""
MOVED: Final = 1.5
"""Factor between two median steps that is more than noise."""
SLICE: Final = 1 << 22
"""Values whose squares are added in fp32, before the sums are added in fp64."""


class SumOverRanks:
    """Adds numbers over the ranks of a group, with the same bits on all ranks.

    An all-gather and sums in the order of ranks make decisions independent of a backend's rounding.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self._group)

    def __call__(self, values: Tensor) -> list[float]:
        """Sum `values` `[n]` of all ranks, which call it together; waits for a GPU that computes them."""
        mine = values.to(self._device, torch.float64)
        gathered = [torch.empty_like(mine) for _ in range(self.num_ranks)]
        dist.all_gather(gathered, mine, group=self._group)
        return [sum(column) for column in zip(*torch.stack(gathered).tolist(), strict=True)]


def energy(vector: Tensor) -> Tensor:
    """Sum the squares of an fp32 `[d]`, as an fp64 scalar on its device.

    >>> energy(torch.tensor([3.0, 4.0])).item()
    25.0
    """
    sums = [torch.dot(piece, piece).double() for piece in torch.split(vector, SLICE)]
    return torch.stack(sums).sum()


def agreed_median(agree: SumOverRanks, seconds: Sequence[float]) -> float:
    """Average each rank's median over ranks, which call it together; NaN if a rank has no values."""
    mine = median(seconds) if seconds else math.nan
    (total,) = agree(torch.tensor([mine], dtype=torch.float64))
    return total / agree.num_ranks


class Ewma:
    """Exponentially weighted mean of the last values.

    The newest weighs `num_ranks / 100` before weights are scaled to add up to one (SelSync, GraVAC): values
    that more ranks have averaged are less noisy and need less smoothing.

    Args:
        num_ranks: above 100, only the newest value counts.
        window: number of values.
    """

    def __init__(self, num_ranks: int, window: int = SMOOTHED_STEPS) -> None:
        self._fading = 1.0 - min(1.0, num_ranks / 100)
        self._values: deque[float] = deque(maxlen=window)

    @property
    def mean(self) -> float:
        """The smoothed value; NaN before the first `add`."""
        if not self._values:
            return math.nan
        weights = [self._fading**age for age in range(len(self._values))]
        products = (weight * value for weight, value in zip(weights, reversed(self._values), strict=True))
        return math.fsum(products) / math.fsum(weights)

    def add(self, value: float) -> None:
        """Add the newest value."""
        self._values.append(value)

    def state_dict(self) -> list[float]:
        """The values, oldest first."""
        return list(self._values)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Restore the values."""
        self._values.clear()
        self._values.extend(state)


def has_moved(before_s: float, now_s: float) -> bool:
    """Whether steps have become so much longer or shorter that measurements may be out of date.

    >>> has_moved(1.0, 1.4), has_moved(1.0, 0.5), has_moved(float("nan"), 1.0)
    (False, True, False)
    """
    return now_s > MOVED * before_s or MOVED * now_s < before_s
