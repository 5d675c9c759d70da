"""How the ranks of a run talk about their checkpoint: a gloo group of their own.

It is apart from the groups of training, so that a background thread may use it while training goes on.
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
"""How long a rank waits in the background for the slowest one to copy and write."""
LONGEST_LOAD: Final = timedelta(hours=1)
"""How long a rank waits for the slowest one to read. One that died is noticed at once, by its closed
connection; one that hangs, only so."""
LONGEST_STEP: Final = timedelta(minutes=30)
"""How long a rank waits for the slowest one to come to a save, unless told otherwise; torch's default."""


class RankGroup:
    """All ranks of the default process group; made by all of them together.

    Args:
        timeout: how long a rank waits for the slowest one, in each call.
    """

    def __init__(self, timeout: timedelta) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        alone = self.world_size == 1
        self._group: Any = None if alone else dist.new_group(backend="gloo", timeout=timeout)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in order, on every rank."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def collect(self, value: T) -> list[T] | None:
        """The values of all ranks, in order, on rank 0; None on the others."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, values, dst=0, group=self._group)
        return values

    def deal(self, values: Sequence[T] | None) -> T:
        """This rank's one of the values that rank 0 gives, one for each rank; others give None."""
        if self._group is None:
            assert values is not None
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, None if values is None else list(values), src=0, group=self._group)
        return mine[0]  # type: ignore[no-any-return]

    def broadcast(self, value: T | None, source: int = 0) -> T:
        """The value of rank `source` on every rank."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=source, group=self._group)
        return values[0]  # type: ignore[return-value]  # the source gave one

    def broadcast_bytes(self, data: Tensor | None, source: int) -> Tensor:
        """The bytes of rank `source`, uint8 `[n]` on the CPU, on every rank; others give None."""
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
        """Fill `data`, uint8 `[n]` on the CPU, with what another rank sends."""
        dist.recv(data, rank, group=self._group)

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


def on_rank(group: RankGroup, rank: int, function: Callable[[], T]) -> T:
    """What one rank's call gives, on every rank; or its error, whatever that is."""
    result: tuple[T | None, Exception | None] = (None, None)
    if group.rank == rank:
        try:
            result = (function(), None)
        except Exception as error:  # else the others would wait for it
            result = (None, shareable(error))
    value, failure = group.broadcast(result, rank)
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]  # without an error there is a value


def on_all(group: RankGroup, function: Callable[[], T]) -> T:
    """What this rank's call gives, once it went well on all of them; the error of one is raised on all."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = function()
    except Exception as error:
        problem = shareable(error)
    problems = [found for found in group.gather(problem) if found is not None]
    if problems:
        raise problem or problems[0]
    return result  # type: ignore[return-value]  # without an error there is one


def shareable(error: Exception) -> Exception:
    """The error, as one of a class that every rank knows and that keeps its message on the way."""
    if isinstance(error, CheckpointError) or type(error) is ValueError:
        return error
    if isinstance(error, ValueError):
        return ValueError(str(error))
    shared = CheckpointError(f"{type(error).__name__}: {error}")
    shared.__cause__ = error
    return shared


class Alone(RankGroup):
    """One rank that asks nobody."""

    def __init__(self) -> None:
        self.rank, self.world_size, self._group = 0, 1, None
