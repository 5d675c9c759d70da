"""Deals some records of each rank among all ranks: data injection of ScaDLES (arXiv 2301.08897).

Where labels are skewed between ranks, what a rank selects of its own gradients is skewed, too. Dealt records
are trained in the same step by another rank, with the same weight; positions stay with who has read them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from data.loader.columns import Rows

Gather = Callable[[Any], Sequence[Any]]
"""Gives what each rank gives, by rank; all ranks call it together."""


class Injection:
    """Deals records by chance.

    Args:
        share: of each rank's records that are dealt, to all ranks alike.
        rank: this rank.
        seed: of the choice, with the rank.
        gather: exchanges the records.
    """

    def __init__(self, share: float, rank: int, seed: int, gather: Gather) -> None:
        self._share, self._rank, self._gather = share, rank, gather
        self._random = np.random.default_rng((seed, rank))

    def deal(self, pieces: Sequence[Rows], world_size: int) -> list[Rows]:
        """Send some of this rank's rows to others, and take what they send; all ranks call it together.

        Returns:
            Rows to train here, those that stay first.
        """
        kept: list[Rows] = []
        sent: list[list[Rows]] = [[] for _ in range(world_size)]
        for piece in pieces:
            count = len(piece.label)
            is_dealt = self._random.random(count) < self._share
            owners = np.where(is_dealt, self._random.integers(world_size, size=count), self._rank)
            for rank in range(world_size):
                if len(positions := np.flatnonzero(owners == rank)):
                    (kept if rank == self._rank else sent[rank]).append(piece.take(positions))
        return kept + [piece for of_rank in self._gather(sent) for piece in of_rank[self._rank]]
