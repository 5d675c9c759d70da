"""What takes less time, found out by doing it: contenders take turns, and all ranks agree on the outcome.

Machines that others use as well are slower at one time than at another, by more than contenders differ. So
each round is compared within itself, and rounds go on until they agree or time is up.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import torch
import torch.distributed as dist

WARM_UP: Final = 3
"""Calls of each before the first round: memory is fresh, connections are made."""
CALLS: Final = 2
"""Of a turn, that are timed; the one before them is not, as it finds in the caches what others left there."""
LEAST_ROUNDS: Final = 8
MOST_ROUNDS: Final = 60
LASTS_S: Final = 15.0
"""After which no further round begins, where the least of them have been made."""

Contender = Callable[[], None]


def race(contenders: Sequence[Contender], device: torch.device) -> list[float]:
    """Seconds that a call of each takes on the slowest rank, the same numbers on all ranks.

    For the first contender it is the median over rounds; for each other one, that times the median of its
    ratio to the first within a round.

    Args:
        contenders: each is the same work for all ranks together, done when the call returns.
        device: of this rank's tensors.
    """
    for each in contenders:
        for _ in range(WARM_UP):
            each()
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while not is_over(rounds):
        *took, elapsed_s = _slowest([*_round(contenders, len(rounds)), time.perf_counter() - began], device)
        rounds.append(took)
        if elapsed_s > LASTS_S and len(rounds) >= LEAST_ROUNDS:
            break
    return typical(rounds)


def is_over(rounds: Sequence[Sequence[float]]) -> bool:
    """Whether further rounds would tell nothing new: the same contender won them all, or they are many.

    Args:
        rounds: seconds of each contender.
    """
    winners = {min(range(len(took)), key=took.__getitem__) for took in rounds}
    return len(rounds) >= MOST_ROUNDS or (len(rounds) >= LEAST_ROUNDS and len(winners) == 1)


def typical(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Seconds of each contender, of all rounds; see `race`."""
    first_s = median(took[0] for took in rounds)
    return [first_s * median(took[each] / took[0] for took in rounds) for each in range(len(rounds[0]))]


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


def _slowest(values: Sequence[float], device: torch.device) -> list[float]:
    held = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(held, op=dist.ReduceOp.MAX)
    return [float(value) for value in held.tolist()]
