"""What controllers look at: energies of vectors, step times, and their smoothed values."""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

import torch
from torch import Tensor

from dlrm.comm.controllers.agreement import Agree

SMOOTHED_STEPS: Final = 25
"""Window of SelSync (arXiv 2307.07950); GraVAC (arXiv 2305.12201) smooths likewise, and here as long."""
MOVED: Final = 1.5
"""Factor between two median steps that is more than noise."""
SLICE: Final = 1 << 22
"""Values whose squares are added in fp32, before the sums go on in fp64."""


def energy(vector: Tensor) -> Tensor:
    """The sum of the squares of an fp32 `[d]`, as an fp64 scalar on its device.

    >>> energy(torch.tensor([3.0, 4.0])).item()
    25.0
    """
    sums = [torch.dot(piece, piece).double() for piece in torch.split(vector, SLICE)]
    return torch.stack(sums).sum()


def agreed_median(agree: Agree, seconds: Sequence[float]) -> float:
    """The mean over ranks of each rank's median; NaN if a rank has none. All ranks call it together."""
    mine = median(seconds) if seconds else math.nan
    (total,) = agree(torch.tensor([mine], dtype=torch.float64))
    return total / agree.num_ranks


class Ewma:
    """Exponentially weighted mean of the last values; an older one weighs less by the same factor a step.

    The newest weighs `num_ranks / 100` before weights are scaled to add up to one (SelSync, GraVAC): the
    more ranks, the less noise in what they agree on, and the less of it needs smoothing away.

    Args:
        num_ranks: above 100, only the newest value counts.
        window: how many values are looked at.
    """

    def __init__(self, num_ranks: int, window: int = SMOOTHED_STEPS) -> None:
        self._fading = 1.0 - min(1.0, num_ranks / 100)
        self._values: deque[float] = deque(maxlen=window)

    @property
    def mean(self) -> float:
        """NaN before the first value."""
        if not self._values:
            return math.nan
        weights = [self._fading**age for age in range(len(self._values))]
        products = (weight * value for weight, value in zip(weights, reversed(self._values), strict=True))
        return math.fsum(products) / math.fsum(weights)

    def add(self, value: float) -> None:
        """One more."""
        self._values.append(value)

    def state_dict(self) -> list[float]:
        """The values, oldest first."""
        return list(self._values)

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Go on from there."""
        self._values.clear()
        self._values.extend(state)


def has_moved(before_s: float, now_s: float) -> bool:
    """Whether steps have become so much longer or shorter that what was measured may be out of date.

    >>> has_moved(1.0, 1.4), has_moved(1.0, 0.5), has_moved(float("nan"), 1.0)
    (False, True, False)
    """
    return now_s > MOVED * before_s or MOVED * now_s < before_s
