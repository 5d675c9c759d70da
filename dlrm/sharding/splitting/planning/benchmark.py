"""Times alternatives on all ranks together, taking turns."""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch
import torch.distributed as dist

from dlrm.comm.autotune.candidates import slowest
from dlrm.comm.autotune.significance import LEAST_ROUNDS, running, typical

WARM_UP: Final = 3
"""Calls of each alternative before the first round, for memory and connections."""
CALLS: Final = 2
"""Timed calls of a turn; the untimed call before them warms the caches."""
MOST_ROUNDS: Final = 60
LASTS_S: Final = 15.0
"""Seconds after which no further round starts, once the least number of rounds is done."""

Alternative = Callable[[], None]


def benchmark(alternatives: Sequence[Alternative], device: torch.device) -> list[float]:
    """Seconds that a call of each alternative takes on the slowest rank, the same numbers on all ranks.

    Each alternative does the same work for all ranks together, finished when the call returns.
    """
    for each in alternatives:
        for _ in range(WARM_UP):
            each()
    left = list(range(len(alternatives)))
    rounds: list[dict[int, float]] = []
    began = time.perf_counter()
    while len(rounds) < MOST_ROUNDS and (len(left) > 1 or not rounds):
        turns = [left[(place + len(rounds)) % len(left)] for place in range(len(left))]
        mine = [*(_turn(alternatives[each]) for each in turns), time.perf_counter() - began]
        *took, elapsed_s = slowest(mine, device, None)
        rounds.append(dict(zip(turns, took, strict=True)))
        left = sorted(running(rounds))
        if elapsed_s > LASTS_S and len(rounds) >= LEAST_ROUNDS:
            break
    times = typical(rounds)
    return [times[each] for each in range(len(alternatives))]


def _turn(alternative: Alternative) -> float:
    """Seconds of a call on this rank."""
    alternative()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(CALLS):
        alternative()
    return (time.perf_counter() - began) / CALLS
