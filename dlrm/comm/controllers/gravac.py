"""GraVAC (arXiv 2305.12201): finds the compression factor that is worth most, by gain and by speed.

The gain of a factor is the share of energy that it keeps, after error feedback; its compression throughput is
gain times steps per second. Factors are tried in ascending order, a window of steps each, while the
throughput rises, and the best one stays. Where the smoothed gain falls below the allowed minimum, steps use
the lowest factor, or send everything. Both factors come from one selection: the higher factor selects from
what the lower one has kept. The gain is that of each rank's own selection; where another rank selects
(AR-Topk, HiTopK) or values are rounded, less energy arrives.

Where the paper is silent, or assumes that compression always pays:

- Factor 1 (dense) is tried first and stays a candidate: training stays dense where steps do not get shorter
  by more than the gain falls.
- Factors of the scale count from the lowest one, also after the floor has moved up.
- Smoothed gains start over with each factor, as they are gains of another compressor.
- A factor is measured by the median step of its window, so that saving a checkpoint does not count.
- The best factor is searched again after 4 windows, after 8, 16 and so on, because gains rise as training
  settles; and at once when the median step has become 1.5 times as long or as short.
"""

import math
from typing import Any, Final

import torch
from torch import Tensor

from dlrm.comm.compression.compressors import Compressor
from dlrm.comm.controllers.controller import (
    Controller,
    Ewma,
    SumOverRanks,
    ValueSelection,
    agreed_median,
    energy,
    has_moved,
    num_kept_of,
)

USED_SHARE: Final = 0.9
"""Share of its window in which a factor must have been good enough to count as measured. A factor that is so
only after steps of a lower one have emptied the residual is worth less than it seems."""
FIRST_PATIENCE: Final = 4
"""Windows after which the best factor is searched again, the first time."""


def factors(policy: str, lowest: float, highest: float) -> tuple[float, ...]:
    """List the factors to try: the lowest one times 2, 4, 16, 256 ... or times 2, 4, 8, 16 ...

    >>> factors("exponential", 10, 1000)
    (10, 20, 40, 160, 1000)
    >>> factors("geometric", 10, 100)
    (10, 20, 40, 80, 100)
    """
    scale, number = [lowest], 0
    while scale[-1] < highest:
        exponent = 2**number if policy == "exponential" else number + 1
        scale.append(min(highest, lowest * 2**exponent))
        number += 1
    return tuple(scale)


class GraVAC(Controller):
    """A controller that finds the compression factor by trying.

    Args:
        agree: adds numbers over ranks.
        lowest_factor: of compression, 1 / ratio; the first factor tried, and the floor to fall back to.
        highest_factor: the last factor tried.
        policy: `exponential` or `geometric`, see `factors`.
        min_gain: smallest share of energy that a step sends; the paper uses 0.7 and 0.9.
        tolerance: relative difference up to which gains, and throughputs, count as equal.
        window_steps: steps for which each factor is tried.
    """

    def __init__(
        self,
        *,
        agree: SumOverRanks,
        lowest_factor: float = 10,
        highest_factor: float = 1000,
        policy: str = "exponential",
        min_gain: float = 0.7,
        tolerance: float = 0.01,
        window_steps: int = 500,
    ) -> None:
        self._agree = agree
        self._scale = (1.0, *factors(policy, lowest_factor, highest_factor))
        self._min_gain, self._tolerance, self._window_steps = min_gain, tolerance, window_steps
        self._patience = FIRST_PATIENCE
        self._windows_left = 0
        self._settled_s: float | None = None
        self._place: int | None  # index in the scale of the factor that is tried; None: the search is over
        self._throughputs: dict[float, float]
        self._explore()

    @property
    def position(self) -> object:
        """See `Controller.position`."""
        return self._steps, self._window_steps, self._tolerance, self.state_dict()

    def choose(self, vector: Tensor, compressor: Compressor) -> ValueSelection:
        """See `Controller.choose`."""
        if self._steps == self._window_steps:
            self._end_window()
        self._steps += 1
        if self._factor == 1:
            self._chosen = 1.0
            choice = ValueSelection(vector.numel())
        else:
            choice = self._compressed(vector, compressor)
        self._steps_of_factor += self._chosen == self._factor
        return choice

    def observe(self, seconds: float) -> None:
        """See `Controller.observe`; without it, training stays dense."""
        if self._chosen == self._factor:
            self._seconds.append(seconds)
        self._chosen = 0.0

    def state_dict(self) -> dict[str, Any]:
        """See `Controller.state_dict`; after loading, the current window starts over."""
        return {
            "setting": self._setting,
            "place": self._place,
            "factor": self._factor,
            "floor": self._floor,
            "throughputs": list(self._throughputs.items()),
            "gain": self._gain.state_dict(),
            "floor_gain": self._floor_gain.state_dict(),
            "patience": self._patience,
            "windows_left": self._windows_left,
            "settled_s": self._settled_s,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state, or start over if it was measured with other ranks or other factors."""
        if state["setting"] != self._setting:
            self._patience = FIRST_PATIENCE
            self._explore()
            return
        self._place, self._factor, self._floor = state["place"], state["factor"], state["floor"]
        self._throughputs = dict(state["throughputs"])
        self._patience, self._windows_left = state["patience"], state["windows_left"]
        self._settled_s = state["settled_s"]
        self._begin_window()
        self._gain.load_state_dict(state["gain"])
        self._floor_gain.load_state_dict(state["floor_gain"])

    @property
    def _setting(self) -> list[float]:
        """The conditions under which measured throughputs are valid."""
        return [self._agree.num_ranks, self._min_gain, *self._scale]

    def _compressed(self, vector: Tensor, compressor: Compressor) -> ValueSelection:
        """Select by the current factor, or the floor, or send everything, as the smallest gain requires."""
        num_at_floor, num_kept = (num_kept_of(vector.numel(), 1 / f) for f in (self._floor, self._factor))
        # one pass over the whole vector serves both factors
        at_floor = compressor.select(vector, num_at_floor)
        floor_values = vector[at_floor]
        kept = compressor.select(floor_values, num_kept)
        energies = torch.stack([energy(vector), energy(floor_values), energy(floor_values[kept])])
        if self._note_gains(*self._agree(energies)):
            if self._gain.mean >= self._min_gain:
                self._chosen = self._factor
                return ValueSelection(num_kept, at_floor[kept])
            if self._floor_gain.mean >= self._min_gain:
                self._chosen = self._floor
                return ValueSelection(num_at_floor, at_floor)
        self._chosen = 1.0
        return ValueSelection(vector.numel())

    def _note_gains(self, whole: float, at_floor: float, kept: float) -> bool:
        """Smooth the gains; false if the gradient is not finite, which all ranks should see."""
        if not math.isfinite(whole):
            return False
        if whole > 0:  # zeros have no gain to learn from
            self._gain.add(kept / whole)
            self._floor_gain.add(at_floor / whole)
        return True

    def _end_window(self) -> None:
        seconds = agreed_median(self._agree, self._seconds)
        if self._place is None:
            self._check_settled(seconds)
        else:
            self._judge(self._place, seconds)
        self._begin_window()

    def _judge(self, place: int, seconds: float) -> None:
        """Try the next factor while the throughput rises."""
        # a factor whose steps mostly fell back to the floor has no throughput of its own
        was_used = self._steps_of_factor >= USED_SHARE * self._window_steps and seconds > 0
        if was_used and self._note_throughput(seconds) and place + 1 < len(self._scale):
            self._place = place + 1
            self._take(self._scale[place + 1])
        else:
            self._settle()

    def _note_throughput(self, seconds: float) -> bool:
        """Record the current factor's throughput; true if it is above those of lower factors above 1."""
        before = [throughput for factor, throughput in self._throughputs.items() if factor > 1]
        gain = 1.0
        if self._factor > 1:
            gain, at_floor = self._gain.mean, self._floor_gain.mean
            if at_floor - gain <= self._tolerance * at_floor:
                self._floor = self._factor  # which loses nothing
        self._throughputs[self._factor] = throughput = gain / seconds
        return not before or throughput > (1 + self._tolerance) * max(before)

    def _settle(self) -> None:
        """Keep the best factor; of equally good ones, the lowest."""
        best = max(self._throughputs.values(), default=0.0)
        good = [f for f, value in self._throughputs.items() if value * (1 + self._tolerance) >= best]
        self._place = None
        self._settled_s = None
        self._windows_left, self._patience = self._patience, 2 * self._patience
        self._take(min(good, default=1.0))

    def _check_settled(self, seconds: float) -> None:
        """Search the best factor again if it is time, or steps have changed."""
        self._windows_left -= 1
        if self._settled_s is None and seconds > 0:
            self._settled_s = seconds
        has_changed = self._settled_s is not None and has_moved(self._settled_s, seconds)
        if self._windows_left == 0 or has_changed:
            self._explore()

    def _explore(self) -> None:
        self._place = 0
        self._throughputs = {}
        self._floor = self._scale[1]
        self._take(1.0)
        self._begin_window()

    def _take(self, factor: float) -> None:
        """Use a factor from now on."""
        self._factor = factor
        if factor > 1:
            self._floor = min(self._floor, factor)
        self._gain, self._floor_gain = Ewma(self._agree.num_ranks), Ewma(self._agree.num_ranks)

    def _begin_window(self) -> None:
        self._steps = self._steps_of_factor = 0
        self._seconds: list[float] = []
        self._chosen = 0.0  # the factor of the last step; 0 if it has been observed
