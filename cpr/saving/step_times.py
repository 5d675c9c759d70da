"""How long training steps take, and how much longer beside saves: what saving in the background costs.

Beside a save, steps share processors, memory and disks with it, on all ranks, which wait for each other in
every step. So one rank sees what they lose together.
"""

from collections import deque
from collections.abc import Sequence
from statistics import fmean, median
from typing import Final

from cpr.checkpoint.save.writer_thread import Save

STEPS_KEPT: Final = 128
"""Newest training steps of whose durations the median, or the mean, counts."""
FAR_LONGER: Final = 8.0
"""A step that takes so many times the median holds something else as well, such as an evaluation: a save does
not slow one down so far."""


class SaveBeside:
    """A save that is under way, and the steps beside it.

    Args:
        save: that was just begun.
        step: training steps done by then.
    """

    def __init__(self, save: Save, step: int) -> None:
        self.save, self.step = save, step
        self._blocked_s = 0.0
        self._longer_s = 0.0
        self._far_longer_s = 0.0
        self._is_known = False

    @property
    def blocked_s(self) -> float:
        """That training waited for it, on the rank where it waited longest."""
        return max(self.save.blocked_s, self.save.longest_blocked_s)

    @property
    def slowed_s(self) -> float | None:
        """How much longer the steps took, besides `blocked_s`, or less if it is negative. None: not known.

        That another rank waited longer is in the steps of this one, too, which waited for that rank: of steps
        that were far longer so much is believed to come of the save.
        """
        if not self._is_known:
            return None
        for_others_s = self.blocked_s - self.save.blocked_s
        return self._longer_s + min(self._far_longer_s, for_others_s) - for_others_s

    def blocked_since(self) -> float:
        """Seconds that training waited for it on this rank since this was asked before."""
        before_s, self._blocked_s = self._blocked_s, self.save.blocked_s
        return self._blocked_s - before_s

    def note(self, longer_s: float, is_far: bool) -> None:
        """A step beside it took so much longer than others, besides what training waited on this rank."""
        self._is_known = True
        if is_far:
            self._far_longer_s += longer_s
        else:
            self._longer_s += longer_s


class StepTimes:
    """The newest steps, those beside saves apart from the others."""

    def __init__(self) -> None:
        self._undisturbed_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self._beside_s: deque[float] = deque(maxlen=STEPS_KEPT)

    @property
    def median_s(self) -> float | None:
        """Of steps without saves; if there are none, of those beside saves, less what they waited."""
        steps = self._undisturbed_s or self._beside_s
        return median(steps) if steps else None

    def note(self, took_s: float, saves: Sequence[SaveBeside]) -> None:
        """A step is complete.

        Args:
            took_s: seconds.
            saves: that were under way in it, if only for a part of it.
        """
        if not saves:
            self._undisturbed_s.append(took_s)
            return
        rest_s = took_s - sum(save.blocked_since() for save in saves)
        self._beside_s.append(rest_s)
        if self._undisturbed_s:
            far_s = FAR_LONGER * median(self._undisturbed_s)
            usual_s = fmean(each for each in self._undisturbed_s if each <= far_s)
            for save in saves:
                save.note((rest_s - usual_s) / len(saves), is_far=rest_s > far_s)
