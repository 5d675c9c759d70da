"""What takes less time, found out by doing it: contenders take turns, and all ranks agree on the outcome."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

WARM_UP: Final = 3
"""Turns of each that do not count."""
LEAST_TURNS: Final = 7
MOST_TURNS: Final = 60
LASTS_S: Final = 6.0
"""About how long all turns together take, where the least of them do not take longer."""


def race(contenders: Sequence[Callable[[], None]], device: torch.device) -> list[float]:
    """Seconds that a turn of each takes on the slowest rank: the median, the same on all ranks.

    Args:
        contenders: each is the same work for all ranks together, done when the call returns.
        device: of this rank's tensors.
    """
    for each in contenders:
        for _ in range(WARM_UP):
            each()
    first = _turns(contenders, 1, device)
    turns = max(LEAST_TURNS, min(MOST_TURNS, int(LASTS_S / sum(took[0] for took in first))))
    return [median(took) for took in _turns(contenders, turns, device)]


def _turns(contenders: Sequence[Callable[[], None]], turns: int, device: torch.device) -> list[list[float]]:
    """Seconds of each contender in each turn; in each, another one comes first."""
    took = torch.zeros(len(contenders), turns, dtype=torch.float64, device=device)
    for turn in range(turns):
        for place in range(len(contenders)):
            mine = (place + turn) % len(contenders)
            dist.barrier()
            began = time.perf_counter()
            contenders[mine]()
            took[mine, turn] = time.perf_counter() - began
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    times: list[list[float]] = took.tolist()
    return times
