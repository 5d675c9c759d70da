"""Object collectives of checkpointing, in gloo groups of their own.

These groups are separate from those of training, so that a background thread can use one during training.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cpr.errors import CheckpointError

T = TypeVar("T")

LONGEST_SAVE: Final = timedelta(days=1)
"""How long a rank waits in the background for the slowest rank to copy and write."""
LONGEST_LOAD: Final = timedelta(hours=1)
"""How long a rank waits for the slowest rank to read. A dead rank is noticed at once, by its closed
connection; a rank that hangs, only by this timeout."""
LONGEST_STEP: Final = timedelta(minutes=30)
"""How long a rank waits by default for the slowest rank to begin a save; torch's default."""


class RankGroup:
    """A gloo group of all ranks of the default process group; all of them construct it together.

    Args:
        timeout: how long a rank waits for the slowest rank in each call.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        alone = self.world_size == 1
        self._group: Any = None if alone else dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: T) -> list[T]:
        """All-gather: the values of all ranks, in order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_to_0(self, value: T) -> list[T] | None:
        """Gather: the values of all ranks, in order, on rank 0; None on the others."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def scatter(self, values: Sequence[T] | None) -> T:
        """Scatter: this rank's value of the list that rank 0 passes, one for each rank; others pass None."""
        if self._group is None:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if values is None else list(values), src=0, group=self._group)
        return mine[0]  # type: ignore[no-any-return]

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """Broadcast: the value of rank `source` on every rank."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=source, group=self._group)
        return values[0]  # type: ignore[return-value]  # the source gave one

    def broadcast_bytes(self, data: Tensor | None, source: int) -> Tensor:
        """Broadcast of bytes, uint8 `[n]` on the CPU, from rank `source`; others pass None."""
        num_bytes = self.broadcast(None if data is None else data.numel(), source)
        if data is None:
            data = torch.empty(num_bytes, dtype=torch.uint8)
        if self._group is not None:
            dist.broadcast(data, src=source, group=self._group)
        return data

    def send(self, data: Tensor, rank: int) -> None:
        """Send bytes, uint8 `[n]` on the CPU, to another rank that is in `receive`."""
        dist.send(data, rank, group=self._group)

    def receive(self, data: Tensor, rank: int) -> None:
        """Fill `data`, uint8 `[n]` on the CPU, with the bytes that another rank sends."""
        dist.recv(data, rank, group=self._group)

    def close(self) -> None:
        """Destroy the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def on_rank(group: RankGroup, rank: int, function: Callable[[], T]) -> T:
    """Call a function on one rank and return its result, or raise its error, on every rank."""
    result: tuple[T | None, Exception | None] = (None, None)
    if group.rank == rank:
        try:
            result = (function(), None)
        except Exception as error:  # the other ranks wait for the broadcast
            result = (None, shareable(error))
    value, failure = group.broadcast(result, rank)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # without an error there is a value


def on_all(group: RankGroup, function: Callable[[], T]) -> T:
    """Call a function on all ranks and return this rank's result; an error on any rank is raised on all."""
    result, problems = attempt_on_all(group, function)
    if problems:
        raise problems[group.rank] if group.rank in problems else next(iter(problems.values()))
    return result  # type: ignore[return-value]  # without an error there is one


def attempt_on_all(group: RankGroup, function: Callable[[], T]) -> tuple[T | None, dict[int, Exception]]:
    """Call a function on all ranks; returns this rank's result, and on all ranks the errors by rank."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = function()
    except Exception as error:  # the other ranks wait for this rank's outcome
        problem = shareable(error)
    return result, {rank: found for rank, found in enumerate(group.gather(problem)) if found is not None}


def shareable(error: Exception) -> Exception:
    """Convert an error to a class that every rank can unpickle with its message."""
    if isinstance(error, CheckpointError) or type(error) is ValueError:
        return error
    if isinstance(error, ValueError):
        return ValueError(str(error))
    shared = CheckpointError(f"{type(error).__name__}: {error}")
    shared.__cause__ = error
    return shared


class Alone(RankGroup):
    """A group of one rank, without communication."""

    def __init__(self) -> None:
        self.rank, self.world_size, self._group = 0, 1, None
