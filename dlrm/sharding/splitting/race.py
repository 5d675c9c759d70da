"""What takes less time, found out by doing it: contenders take turns, and all ranks agree on the outcome."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.planner import slowest
from dlrm.comm.rounds import LEAST_ROUNDS, agree, typical

WARM_UP: Final = 3
"""Calls of each before the first round: memory is fresh, connections are made."""
CALLS: Final = 2
"""Of a turn, that are timed; the one before them is not, as it finds in the caches what others left there."""
MOST_ROUNDS: Final = 60
LASTS_S: Final = 15.0
"""After which no further round begins, where the least of them have been made."""

Contender = Callable[[], None]


def race(contenders: Sequence[Contender], device: torch.device) -> list[float]:
    """Seconds that a call of each takes on the slowest rank, as `typical`: the same numbers on all ranks.

    Args:
        contenders: each is the same work for all ranks together, done when the call returns.
        device: of this rank's tensors.
    """
    for each in contenders:
        for _ in range(WARM_UP):
            each()
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < MOST_ROUNDS and not agree(rounds):
        *took, elapsed_s = slowest(
            [*_round(contenders, len(rounds)), time.perf_counter() - began], device, None
        )
        rounds.append(took)
        if elapsed_s > LASTS_S and len(rounds) >= LEAST_ROUNDS:
            break
    return typical(rounds)


def _round(contenders: Sequence[Contender], number: int) -> list[float]:
    """Seconds of a call of each contender on this rank; in each round, another one comes first."""
    took = [0.0] * len(contenders)
    for place in range(len(contenders)):
        mine = (place + number) % len(contenders)
        contenders[mine]()
        dist.barrier()
        began = time.perf_counter()
        for _ in range(CALLS):
            contenders[mine]()
        took[mine] = (time.perf_counter() - began) / CALLS
    return took
