"""Adapts the sizes of the loader's batches to the speeds of ranks while they train."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Self

from data.loader import DataLoader
from dlrm.batching.controller import BatchController
from dlrm.batching.waits import timed_waits

logger = logging.getLogger(__name__)


class DynamicBatching:
    """Measures this rank, shares the measurements of all, and resizes batches (`train.batching=dynamic`).

    Ranks share their seconds among the scalars that they average with the gradients, each in a place of its
    own, so that nothing more is sent, and all ranks see, and thus decide, the same.

    Args:
        loader: of the training days; has the sizes, and saves them with its position.
        rank: this rank.
        world_size: number of ranks.
        keep: stores the sizes, which are proportional to speeds, for the next launch's plan of the tables; a
            collective. It raises `ValueError` if it cannot.
    """

    def __init__(
        self, loader: DataLoader, rank: int, world_size: int, keep: Callable[[Sequence[float]], None]
    ) -> None:
        self._loader, self._rank, self._world_size, self._keep = loader, rank, world_size, keep
        self._controller: BatchController | None = None
        self._exits = ExitStack()
        self._waited_s: Callable[[], float] = float
        self._began_s = self._waited_before_s = self._own_s = 0.0

    def __enter__(self) -> Self:
        self._waited_s = self._exits.enter_context(timed_waits())
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    def begin(self) -> None:
        """Begin to measure: what follows, up to `end`, is a step."""
        self._began_s, self._waited_before_s = perf_counter(), self._waited_s()

    def end(self) -> None:
        """Note how long this rank has worked since `begin`, without its waiting for others."""
        waited_s = self._waited_s() - self._waited_before_s
        self._own_s = perf_counter() - self._began_s - waited_s

    @property
    def scalars(self) -> list[float]:
        """What this rank adds to the means over ranks: zeros, and its seconds of the step before."""
        own = [0.0] * self._world_size
        own[self._rank] = self._own_s * self._world_size
        return own

    def adapt(self, seconds: Sequence[float], step: int) -> tuple[int, ...] | None:
        """Resize the batches of the steps after `step`, if the mean of all ranks' `scalars` says so.

        Returns the new sizes; None: they stay.
        """
        if self._controller is None:  # a position with sizes may have been loaded
            self._controller = BatchController(self._loader.sizes)
        before = self._controller.sizes
        sizes = self._controller.observe(seconds)
        if sizes is None:
            return None
        self._loader.resize(sizes)
        if self._rank == 0:
            logger.info(
                "step %d: batches of %s samples instead of %s, with which ranks worked %s ms on average",
                step,
                list(sizes),
                list(before),
                ", ".join(f"{1000 * each:.0f}" for each in self.seconds),
            )
        return sizes

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each rank in a step, on average, by which sizes changed last; empty before that."""
        return () if self._controller is None else self._controller.seconds

    def leave(self) -> None:
        """Store the sizes; a collective, when a launch ends and everything is saved."""
        try:
            self._keep(self._loader.sizes)
        except ValueError as error:
            if self._rank == 0:
                logger.warning("%s: tables stay where they are", error)
