"""Chooses the batch size of each rank by measured speed (Tyagi & Sharma, arXiv 2305.12213).

A proportional controller: a rank that trains `b` samples in `t` seconds of its own has the speed `b / t`, and
the next sizes are proportional to speeds. The paper's rule `b * mean(t) / t` does not keep the global batch;
sizes that are shares of it do, and they meet where all ranks take equally long, whatever part of `t` does not
depend on `b`.

Sizes change only if a rank's would change by more than a dead band and by more than the noise of the
measurement explains. So noise alone changes nothing, and where times are steady, a few steps suffice.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

DEAD_BAND: Final = 0.05
"""Relative change of a size that is not worth a change, as in the paper."""
STANDARD_ERRORS: Final = 4.0
"""By how many standard errors a change must exceed the dead band. Sizes are judged so often that an error of
few of them would be found at some time."""
WINDOWS_S: Final = (10.0, 60.0)
"""Times of the steps of so many seconds are averaged: a short window follows large changes soon, a long one
sees small differences through the noise of steps of a few milliseconds."""
LEAST_STEPS: Final = 8
"""Steps that are averaged at least, and after which sizes are judged again."""
SETTLING_STEPS: Final = 2
"""Steps after a change that are not counted: they allocate memory for batches of another size."""
LEAST_SHARE: Final = 1 / 16
"""Smallest size of a rank, in shares of an equal batch: a rank slower than that would rather be replaced."""

Seconds = npt.NDArray[np.float64]


class BatchController:
    """Decides on sizes; equal on all ranks, as it sees equal measurements.

    Args:
        sizes: present samples of each rank in one step, each at least 1.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.seconds: tuple[float, ...] = ()
        """Of each rank in a step, on average, by which sizes changed last; of the sizes before that."""
        self._begin()

    def observe(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        """Take the measurement of a step, and return the sizes of the next ones if they change.

        Args:
            seconds: of each rank, in which it worked and did not wait for others.
        """
        if self._settling:
            self._settling -= 1
            return None
        self._steps.append(seconds)
        if len(self._steps) < LEAST_STEPS:
            return None
        steps = np.maximum(np.array(self._steps, np.float64), 1e-9)
        self._steps.clear()
        for window in self._windows:
            window.add(steps)
            means, errors = window.means_and_errors()
            if wanted := self._wanted(means, errors):
                self.sizes, self.seconds = wanted, tuple(means.tolist())
                self._begin()
                return wanted
        return None

    def _begin(self) -> None:
        """Measure anew, as times of other sizes say little."""
        self._windows = [_Window(each, len(self.sizes)) for each in WINDOWS_S]
        self._settling = SETTLING_STEPS
        self._steps: list[Sequence[float]] = []
        """Observed since sizes were judged."""

    def _wanted(self, means: Seconds, errors: Seconds) -> tuple[int, ...] | None:
        """Sizes in proportion to speeds, if they differ from the present ones by more than noise."""
        sizes = np.asarray(self.sizes)
        wanted = shares(sizes / means, int(sizes.sum()))
        changes = np.abs(np.asarray(wanted) - sizes) / sizes
        # a rank's size depends on its own speed, and on the sum of all
        noise = STANDARD_ERRORS * np.hypot(errors, np.linalg.norm(errors * sizes) / sizes.sum())
        # a size that rounding alone may change by one sample is no news, either
        return wanted if (changes > np.maximum(DEAD_BAND, 1.5 / sizes) + noise).any() else None


class _Window:
    """Seconds of each rank in the newest steps, as running sums.

    Args:
        length_s: seconds of steps that it has, about.
        num_ranks: number of ranks.
    """

    def __init__(self, length_s: float, num_ranks: int) -> None:
        self._length_s = length_s
        self._newest: deque[Seconds] = deque()
        self._sums, self._squares, self._took_s = np.zeros(num_ranks), np.zeros(num_ranks), 0.0

    def add(self, steps: Seconds) -> None:
        """Add `LEAST_STEPS` steps, seconds `[steps, ranks]`, and leave out the oldest ones."""
        self._newest.append(steps)
        self._count(steps, 1)
        while len(self._newest) > 1 and self._took_s > self._length_s:
            self._count(self._newest.popleft(), -1)

    def means_and_errors(self) -> tuple[Seconds, Seconds]:
        """Means, and their standard errors relative to them."""
        num = LEAST_STEPS * len(self._newest)
        means = self._sums / num
        variances = np.maximum(self._squares / num - means**2, 0) * num / (num - 1)
        return means, (variances / num) ** 0.5 / means

    def _count(self, steps: Seconds, times: int) -> None:
        self._sums += times * steps.sum(0)
        self._squares += times * (steps**2).sum(0)
        self._took_s += times * float(steps.max(1).sum())


def shares(speeds: Sequence[float] | Seconds, total: int) -> tuple[int, ...]:
    """Whole sizes with the sum `total`, proportional to positive speeds, but none below `LEAST_SHARE`.

    Raises:
        ValueError: there are fewer samples than ranks.
    """
    weights = np.asarray(speeds, np.float64)
    least = max(1, int(LEAST_SHARE * total / len(weights)))
    if total < len(weights):
        raise ValueError(f"a step of {total} samples cannot give each of {len(weights)} ranks one")
    is_least = np.zeros(len(weights), bool)
    while True:  # ranks at the bound leave less to the others, of which more may then be at it
        left = total - least * int(is_least.sum())
        exact = np.where(is_least, least, left * weights / weights[~is_least].sum())
        below = (exact < least) & ~is_least
        if not below.any():
            break
        is_least |= below
    sizes = np.floor(exact).astype(int)
    # the largest remainders are rounded up, of equal ones those of the lower ranks
    order = np.argsort(sizes - exact, kind="stable")
    sizes[order[: total - int(sizes.sum())]] += 1
    return tuple(sizes.tolist())
