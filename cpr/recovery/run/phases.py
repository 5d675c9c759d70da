"""Seconds from a worker's death to the first new step, by phase."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from cpr.processes import Process

PHASES: Final = (
    *("detect", "restart", "imports", "rendezvous", "build", "reattach", "restore", "first_step"),
)
"""In order. `detect`: from the dead worker's last sign of life until the first survivor left; `restart`:
until this process began; `imports`: until `PartialRecovery` was made; `rendezvous`, `build`: those blocks;
`reattach`: from there until it is known what is held and what is lost; `restore`: rows and states are put in
place; `first_step`: until the first new step is finished. Time between the blocks is nobody's."""


class Phases:
    """A clock of phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measured(self, phase: str) -> Iterator[None]:
        """The block belongs to a phase."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, time.perf_counter() - began)

    def add(self, phase: str, seconds: float) -> None:
        """Some more seconds in a phase."""
        assert phase in PHASES
        self.seconds[phase] = self.seconds.get(phase, 0.0) + max(0.0, seconds)


def note_death(phases: Phases, left_ns: Sequence[int], last_beats_ns: Sequence[int], began_ns: int) -> None:
    """Add the phases before this process began.

    Args:
        phases: where to.
        left_ns: when workers left of their own accord, `time.time_ns()`.
        last_beats_ns: last signs of life of those that did not.
        began_ns: when this process began.
    """
    died_ns = max(last_beats_ns, default=None)
    noticed_ns = min(left_ns, default=died_ns)
    if noticed_ns is None:
        return
    if left_ns and died_ns is not None:
        phases.add("detect", (noticed_ns - died_ns) / 1e9)
    phases.add("restart", (began_ns - noticed_ns) / 1e9)


def process_began_ns() -> int:
    """When this process began, as `time.time_ns()` would have said; to 10 ms."""
    began_s = Process.this().start_ticks / os.sysconf("SC_CLK_TCK")
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    return time.time_ns() - int(age_s * 1e9)
