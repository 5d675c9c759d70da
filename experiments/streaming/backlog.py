"""How many records wait when more arrive than are trained: measured, and by the formula of ScaDLES."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from experiments.harness.record import Row

POINTS: Final = 100
"""Points of a curve that are stored for the picture, at most."""


@dataclass(frozen=True, kw_only=True)
class Backlog:
    """Growth of the backlog in a time in which more records arrive than are trained.

    ScaDLES (arXiv 2301.08897, section on buffers): after T steps of t seconds with b records each, of the
    records that arrive at S a second, Q(T) = (t * S - b) * T + S wait.
    """

    step_s: float
    """Mean time of a step, t."""
    batch: float
    """Mean records of a step, b."""
    arrivals_per_s: float
    """Records that arrive, S."""
    growth: float
    """Measured growth by the step, in records: slope of a line fitted to the records that wait."""

    @classmethod
    def of(cls, steps: Sequence[Row], arrivals: Sequence[tuple[float, int]]) -> "Backlog":
        """From lines of the kind `stream`, and times (Unix, s) with the records that had arrived by then."""
        numbers, times = (np.array([line[name] for line in steps]) for name in ("step", "time"))
        took = numbers[-1] - numbers[0]
        return cls(
            step_s=float((times[-1] - times[0]) / took),
            batch=float((steps[-1]["trained"] - steps[0]["trained"]) / took),
            arrivals_per_s=_slope(*zip(*arrivals, strict=True)),
            growth=_slope(numbers, [line["waiting"] for line in steps]),
        )

    @property
    def expected(self) -> float:
        """Growth by the step in theory."""
        return self.step_s * self.arrivals_per_s - self.batch

    @property
    def error(self) -> float:
        """Difference of the measured growth, as a share of the expected one."""
        return abs(self.growth / self.expected - 1)


def curve(steps: Sequence[Row]) -> list[list[int]]:
    """Steps and the records that wait, of evenly spaced lines."""
    every = -(-len(steps) // POINTS)
    return [[line["step"] - steps[0]["step"], line["waiting"]] for line in steps[::every]]


def _slope(of: Sequence[float] | np.ndarray, values: Sequence[float]) -> float:
    return float(np.polyfit(np.array(of) - of[0], values, 1)[0])
