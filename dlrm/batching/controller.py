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
"""By how many standard errors a change must exceed the dead band. Sizes are judged after each step, so that
an error of few of them would be found in some step."""
WINDOW_S: Final = 10.0
"""Times of the steps of so many seconds are averaged."""
LEAST_STEPS: Final = 8
"""Steps that are averaged at least."""
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
        self._steps: deque[Seconds] = deque()
        """Seconds of each rank in the newest steps."""
        self._settling = SETTLING_STEPS

    def observe(self, seconds: Sequence[float]) -> tuple[int, ...] | None:
        """Take the measurement of a step, and return the sizes of the next ones if they change.

        Args:
            seconds: of each rank, in which it worked and did not wait for others.
        """
        if self._settling:
            self._settling -= 1
            return None
        self._steps.append(np.maximum(np.asarray(seconds, np.float64), 1e-9))
        while len(self._steps) > LEAST_STEPS and sum(each.max() for each in self._steps) > WINDOW_S:
            self._steps.popleft()
        if len(self._steps) < LEAST_STEPS:
            return None
        measured = np.stack(self._steps)
        means = measured.mean(0)
        errors = measured.std(0, ddof=1) / means / len(measured) ** 0.5
        sizes = np.asarray(self.sizes)
        wanted = shares(sizes / means, int(sizes.sum()))
        changes = np.abs(np.asarray(wanted) - sizes) / sizes
        # a rank's size depends on its own speed, and on the sum of all
        noise = STANDARD_ERRORS * np.hypot(errors, np.linalg.norm(errors * sizes) / sizes.sum())
        # a size that rounding alone may change by one sample is no news, either
        if not (changes > np.maximum(DEAD_BAND, 1.5 / sizes) + noise).any():
            return None
        self.sizes, self._settling = wanted, SETTLING_STEPS
        self._steps.clear()
        return wanted


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
