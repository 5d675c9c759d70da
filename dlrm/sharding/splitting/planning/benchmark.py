"""What takes less time, found out by doing it: contenders take turns, and all ranks agree on the outcome."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.autotune.candidates import slowest
from dlrm.comm.autotune.significance import LEAST_ROUNDS, running, typical

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
    left = list(range(len(contenders)))
    rounds: list[dict[int, float]] = []
    began = time.perf_counter()
    while len(rounds) < MOST_ROUNDS and (len(left) > 1 or not rounds):
        turns = [left[(place + len(rounds)) % len(left)] for place in range(len(left))]
        mine = [*(_turn(contenders[each]) for each in turns), time.perf_counter() - began]
        *took, elapsed_s = slowest(mine, device, None)
        rounds.append(dict(zip(turns, took, strict=True)))
        left = sorted(running(rounds))
        if elapsed_s > LASTS_S and len(rounds) >= LEAST_ROUNDS:
            break
    times = typical(rounds)
    return [times[each] for each in range(len(contenders))]


def _turn(contender: Contender) -> float:
    """Seconds of a call on this rank."""
    contender()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        contender()
    return (time.perf_counter() - began) / CALLS
