"""Pareto (Tyagi and Swany, arXiv 2312.02493): trades short steps against much of the gradient's energy.

The paper minimises compression time, exchange time and 1 / gain with NSGA-II on fitted curves, over shares
from 0.1 to 0.001. Half a dozen candidates can be enumerated instead: each share is tried for a few steps of
training, and one is chosen from those that no other beats in both aims. The two times add up in the step,
which is what is measured. The paper tries candidates on a copy of the model; here error feedback makes that
needless, as a later step sends what a trial left out.

Candidates are tried again when the gain of the chosen one has moved by a tenth (the paper's trigger), or the
step by a factor of 1.5, as when a link has changed.
"""

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import torch
from torch import Tensor

from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.controllers.controller import (
    Controller,
    SumOverRanks,
    ValueSelection,
    agreed_median,
    energy,
    has_moved,
    num_kept_of,
)

RATIOS: Final = (1.0, 0.1, 0.033, 0.011, 0.004, 0.001)
"""Shares to try: dense, and the paper's."""
TIME_WEIGHT: Final = 0.6
"""Weight of time, against 0.4 of inverse gain, in the authors' code."""
EQUAL: Final = 0.01
"""Relative difference of costs up to which points are equally good."""
GAIN_MOVED: Final = 0.1
"""Relative change of a gain after which candidates are tried again."""


@dataclass(frozen=True)
class Point:
    """A share of the gradient with its measured step time and gain."""

    ratio: float
    seconds: float
    """Duration of a step."""
    gain: float
    """Share of the energy that is sent."""


def pareto_set(points: Sequence[Point]) -> list[Point]:
    """Find the points that no other beats, being as good in both aims and better in one."""

    def beats(one: Point, other: Point) -> bool:
        no_worse = one.seconds <= other.seconds and one.gain >= other.gain
        return no_worse and (one.seconds, one.gain) != (other.seconds, other.gain)

    return [point for point in points if not any(beats(other, point) for other in points)]


def knee(points: Sequence[Point]) -> Point:
    """Find the point of least `seconds ** 0.6 / gain ** 0.4`; of equally good ones, the largest share.

    Ratios count, and not ranks between the best and the worst candidate, by which noise of a per cent would
    decide between similar candidates.
    """
    front = pareto_set(points)
    costs = [TIME_WEIGHT * math.log(p.seconds) - (1 - TIME_WEIGHT) * math.log(p.gain) for p in front]
    good = [point for point, cost in zip(front, costs, strict=True) if cost <= min(costs) + EQUAL]
    return max(good, key=lambda point: point.ratio)


class Pareto(Controller):
    """A controller that finds the share by trying all candidates.

    Args:
        agree: adds numbers over ranks.
        sample_steps: steps for which each is tried.
        rest_steps: steps between checks whether the choice is still up to date.
    """

    def __init__(self, *, agree: SumOverRanks, sample_steps: int = 10, rest_steps: int = 200) -> None:
        self._agree = agree
        self._sample_steps, self._rest_steps = sample_steps, rest_steps
        self._place: int | None  # index of the share that is tried; None: the search is over
        self._points: list[Point]
        self._settled: Point | None
        self._explore()

    @property
    def position(self) -> object:
        """See `Controller.position`."""
        return self._steps, self._sample_steps, self._rest, self._rest_steps, self.state_dict()

    def choose(self, vector: Tensor, compressor: Compressor) -> ValueSelection:
        """See `Controller.choose`."""
        if self._steps == self._sample_steps:
            self._end_sample()
        num_kept = num_kept_of(vector.numel(), self._ratio)
        self._is_sampled = self._rest == 0
        if not self._is_sampled:
            self._rest -= 1
            return ValueSelection(num_kept)
        self._steps += 1
        if self._ratio == 1:
            return ValueSelection(num_kept)
        indices = compressor.select(vector, num_kept)
        self._energies.append(torch.stack([energy(vector), energy(vector[indices])]))
        return ValueSelection(num_kept, indices)

    def observe(self, seconds: float) -> None:
        """See `Controller.observe`; without it, training stays dense."""
        if self._is_sampled:
            self._seconds.append(seconds)
        self._is_sampled = False

    def state_dict(self) -> dict[str, Any]:
        """See `Controller.state_dict`; after loading, the current sample starts over."""
        return {
            "setting": self._setting,
            "place": self._place,
            "ratio": self._ratio,
            "points": [astuple(point) for point in self._points],
            "settled": None if self._settled is None else astuple(self._settled),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, or start over if it was measured with other ranks or other candidates."""
        if state["setting"] != self._setting:
            self._explore()
            return
        self._place, self._ratio = state["place"], state["ratio"]
        self._points = [Point(*values) for values in state["points"]]
        self._settled = None if state["settled"] is None else Point(*state["settled"])
        self._begin_sample(after=0)

    @property
    def _setting(self) -> list[float]:
        """The conditions under which measured points are valid."""
        return [self._agree.num_ranks, *RATIOS]

    def _end_sample(self) -> None:
        point = self._measured()
        if self._place is None:
            self._check_settled(point)
            return
        if point is not None:
            self._points.append(point)
        if self._place + 1 < len(RATIOS):
            self._place += 1
            self._ratio = RATIOS[self._place]
            self._begin_sample(after=0)
        else:
            self._settle()

    def _measured(self) -> Point | None:
        """Measure the sample's point; None if it is unusable, as with gradients that are not finite."""
        seconds = agreed_median(self._agree, self._seconds)
        gain = 1.0
        if self._energies:
            whole, kept = self._agree(torch.stack(self._energies).sum(dim=0))
            gain = kept / whole if whole else 1.0
        usable = math.isfinite(gain) and gain > 0 and seconds > 0
        return Point(ratio=self._ratio, seconds=seconds, gain=gain) if usable else None

    def _settle(self) -> None:
        """Keep the knee, or stay dense if nothing could be measured."""
        self._settled = knee(self._points) if self._points else None
        self._place = None
        self._ratio = 1.0 if self._settled is None else self._settled.ratio
        self._begin_sample(after=self._rest_steps)

    def _check_settled(self, now: Point | None) -> None:
        """Try all shares again if gain or step time have moved."""
        before, self._settled = self._settled, self._settled or now
        if before is not None and now is not None:
            gain_moved = abs(now.gain - before.gain) >= GAIN_MOVED * before.gain
            if gain_moved or has_moved(before.seconds, now.seconds):
                self._explore()
                return
        self._begin_sample(after=self._rest_steps)

    def _explore(self) -> None:
        self._place = 0
        self._ratio = 1.0
        self._points = []
        self._settled = None
        self._begin_sample(after=0)

    def _begin_sample(self, after: int) -> None:
        """Measure the next steps, or those after a rest of `after` steps."""
        self._rest, self._steps, self._is_sampled = after, 0, False
        self._seconds: list[float] = []
        self._energies: list[Tensor] = []
