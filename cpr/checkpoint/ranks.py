"""How the ranks of a run talk about their checkpoint: a gloo group of their own.

It is apart from the groups of training, so that a background thread may use it while training goes on.
"""

from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

T = TypeVar("T")

TIMEOUT: Final = timedelta(days=1)
"""How long a rank waits for the slowest one: as long as copying and writing may take. A rank that died is
noticed at once, by its closed connection."""


class RankGroup:
    """All ranks of the default process group; made by all of them together."""

    def __init__(self, timeout: timedelta = TIMEOUT) -> None:
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

    def broadcast(self, value: T | None) -> T:
        """Rank 0's value on every rank."""
        values = [value]
        if self._group is not None:
            dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]  # type: ignore[return-value]  # rank 0 gave one

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None


class Alone(RankGroup):
    """One rank that asks nobody."""

    def __init__(self) -> None:
        self.rank, self.world_size, self._group = 0, 1, None
