"""Dynamic batching that is switched off and on by turns within a run, to time what it adds to a step.

Two runs differ by a tenth for reasons of their own, and neighbouring seconds of one run do not.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any, Final, Self

from dlrm.batching.dynamic import DynamicBatching

BLOCK_STEPS: Final = 8
"""Steps between two switches."""
WARM_UP_BLOCKS: Final = 2


class SwitchedBatching(DynamicBatching):
    """On in every second block of steps. In the others it measures nothing, and still shares as many scalars.

    Args:
        path: of a JSON file for the times at which steps begin, in seconds; written by rank 0 at the end.
    """

    path: Path

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._times: list[float] = []
        self._is_on = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        if self._rank == 0:
            self.path.write_text(json.dumps(self._times))

    def begin(self) -> None:
        """Note the time, and switch after each block."""
        is_on = len(self._times) // BLOCK_STEPS % 2 == 1
        self._times.append(perf_counter())
        if is_on != self._is_on:
            self._is_on = is_on
            if is_on:
                super().__enter__()
            else:
                super().__exit__()
        if is_on:
            super().begin()

    def end(self) -> None:
        """See `DynamicBatching`."""
        if self._is_on:
            super().end()

    @property
    def scalars(self) -> list[float]:
        """See `DynamicBatching`."""
        return super().scalars if self._is_on else [0.0] * self._world_size

    def adapt(self, seconds: Sequence[float], step: int) -> tuple[int, ...] | None:
        """See `DynamicBatching`."""
        return super().adapt(seconds, step) if self._is_on else None


def added_share(times: Sequence[float]) -> float:
    """Median share that a block with batching takes longer than the mean of those before and after it."""
    steps = [after - before for before, after in pairwise(times)]
    blocks = [
        mean(steps[begin : begin + BLOCK_STEPS])
        for begin in range(0, len(steps) - BLOCK_STEPS + 1, BLOCK_STEPS)
    ]
    on = range(WARM_UP_BLOCKS + 1, len(blocks) - 1, 2)
    return median(2 * blocks[at] / (blocks[at - 1] + blocks[at + 1]) - 1 for at in on)
