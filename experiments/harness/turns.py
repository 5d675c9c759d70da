"""Contenders take turns in the same processes, round by round, so that a slow minute strikes all of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from time import perf_counter

import torch.distributed as dist

from dlrm.launch.device import of_rank_0
from experiments.harness.network import sent_bytes
from experiments.harness.statistics import Ratio

Rounds = Sequence[Mapping[str, float]]
"""Seconds of a step by contender, for each round; a contender that left does not return."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Number of rounds and time limit of a cell."""

    full_rounds: int
    """First rounds, of all contenders."""
    least_rounds: int
    """Minimum of all rounds; after the full ones, only contenders close to the best continue."""
    most_rounds: int
    seconds: float
    """Time limit after the full rounds, once the minimum of rounds is reached."""
    reach: float
    """Relative reach of the intervals at which a cell ends early."""

    def is_enough(self, rounds: Rounds, elapsed_s: float, one: str, others: Iterable[str]) -> bool:
        """Whether the intervals of all ratios of `one` to the `others` are narrow, or the time is up.

        Args:
            rounds: so far.
            elapsed_s: since the full rounds.
            one: a contender.
            others: contenders that it is compared with.
        """
        if len(rounds) < max(self.full_rounds, self.least_rounds):
            return False
        if len(rounds) >= self.most_rounds or elapsed_s > self.seconds:
            return True
        return all(Ratio.of(ratios(rounds, one, other)).reach <= self.reach for other in others)


def ratios(rounds: Rounds, one: str, other: str) -> list[float]:
    """Throughput of `one` contender over that of the `other`, in each round with both."""
    return [each[other] / each[one] for each in rounds if {one, other} <= each.keys()]


def take_turns(
    names: Iterable[str],
    turn: Callable[[str], float],
    remaining: Callable[[Rounds, float], Iterable[str]],
    full_rounds: int = 0,
) -> list[dict[str, float]]:
    """Make rounds in which each contender has a turn, in a new random order; a collective call.

    Args:
        names: contenders of the first round.
        turn: makes the turn of a contender; returns the seconds of a step.
        remaining: contenders of the next round, none at the end, from the rounds so far and the seconds since
            the full rounds; rank 0 decides.
        full_rounds: see `Effort`.
    """
    order, shuffled, began = sorted(names), Random(0), perf_counter()
    rounds: list[dict[str, float]] = []

    def decide() -> list[str]:
        return sorted(remaining(rounds, perf_counter() - began))

    while order:
        shuffled.shuffle(order)
        rounds.append({name: turn(name) for name in order})
        if len(rounds) == full_rounds:
            began = perf_counter()
        order = of_rank_0(decide)
    return rounds


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds from the moment when all ranks begin some work until all have done it."""
    dist.barrier()
    began = perf_counter()
    work()
    dist.barrier()
    return perf_counter() - began


def seconds_and_bytes_of(work: Callable[[], object]) -> tuple[float, int]:
    """Like `seconds_of`, with bytes that left this process's node for that work (see `sent_bytes`)."""
    dist.barrier()  # sends of earlier work may have returned before their bytes left the node
    before = sent_bytes()
    took_s = seconds_of(work)
    return took_s, sent_bytes() - before
