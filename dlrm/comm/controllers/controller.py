"""The base class of controllers, which decide how much of a gradient is sent, and what they measure."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.comm.compression.compressors import Compressor

SMOOTHED_STEPS: Final = 25
"""Window of SelSync (arXiv 2307.07950); GraVAC (arXiv 2305.12201) smooths likewise, here as long."""
MOVED: Final = 1.5
"""Factor between two median steps that is more than noise."""
SLICE: Final = 1 << 22
"""Values whose squares are added in fp32, before the sums are added in fp64."""


@dataclass(frozen=True)
class ValueSelection:
    """How much of a vector a rank sends in a step."""

    num_kept: int
    """Number of values, the same on all ranks; if all of them, a dense collective sends them."""
    indices: Tensor | None = None
    """int64 `[num_kept]` into the whole vector, where the controller has run the compressor already;
    collectives that select from shards ignore them."""


class Controller:
    """Decides from values that all ranks have agreed on, so that all ranks decide alike.

    All ranks call its methods in the same steps, since some calls of `choose` exchange a few numbers.
    """

    @property
    def position(self) -> object:
        """Plain values that all later decisions depend on, besides the vectors: the same on all ranks.

        Ranks compare them before `choose` exchanges anything.
        """
        raise NotImplementedError

    def choose(self, vector: Tensor, compressor: Compressor) -> ValueSelection:
        """Decide how much of this step's vector, fp32 `[d]`, is sent; it is left unchanged."""
        raise NotImplementedError

    def observe(self, seconds: float) -> None:
        """Learn from the duration of the last chosen step on this rank, its computation included.

        Steps without a choice are ignored.
        """

    def state_dict(self) -> dict[str, Any]:
        """The measurements and decisions so far, JSON-able; the same on all ranks."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state; all ranks load the same state before the same step."""


class Fixed(Controller):
    """Sends the same share of every vector.

    Args:
        ratio: share that is sent, above 0 and at most 1 (dense).
    """

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    @property
    def position(self) -> object:
        """See `Controller.position`."""
        return self._ratio

    def choose(self, vector: Tensor, compressor: Compressor) -> ValueSelection:
        """See `Controller.choose`; the collective selects."""
        return ValueSelection(num_kept_of(vector.numel(), self._ratio))


def num_kept_of(num_values: int, ratio: float) -> int:
    """Compute how many of `num_values` values a ratio keeps: at least one, where there is one.

    >>> num_kept_of(1000, 0.01), num_kept_of(30, 0.1), num_kept_of(5, 0.01), num_kept_of(0, 0.01)
    (10, 3, 1, 0)
    """
    return min(num_values, max(1, round(ratio * num_values)))


class SumOverRanks:
    """Adds numbers over the ranks of a group, with the same bits on all ranks.

    An all-gather and sums in the order of ranks make decisions independent of a backend's rounding.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self._device, self._group = device, group
        self.num_ranks = dist.get_world_size(group)

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

    With more than 100 ranks, only the newest value counts.
    """

    def __init__(self, num_ranks: int) -> None:
        self._fading = 1.0 - min(1.0, num_ranks / 100)
        self._values: deque[float] = deque(maxlen=SMOOTHED_STEPS)

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
