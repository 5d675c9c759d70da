"""Several ranks in threads of one process; their collectives fail if one of them stays away."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cpr.checkpoint.catalog.committer import Committer, Retention
from cpr.checkpoint.collectives import RankGroup
from cpr.checkpoint.storage.base import Storage

PATIENCE_S = 20.0


class _Board:
    """Where the ranks lay down what they tell each other."""

    def __init__(self, world_size: int) -> None:
        self.barrier = threading.Barrier(world_size, timeout=PATIENCE_S)
        self.values: dict[int, Any] = {}


class ThreadGroup(RankGroup):
    """One rank of several."""

    def __init__(self, board: _Board, rank: int, world_size: int) -> None:
        self.rank, self.world_size, self._board = rank, world_size, board
        self._group = None
        self.received: list[Any] = []
        """Everything that this rank received from other ranks."""

    def _exchange(self, value: Any) -> dict[int, Any]:
        self._board.values[self.rank] = value
        self._board.barrier.wait()
        values = dict(self._board.values)
        self._board.barrier.wait()
        return values

    def gather(self, value):
        values = self._exchange(value)
        self.received.append([values[rank] for rank in range(self.world_size) if rank != self.rank])
        return [values[rank] for rank in range(self.world_size)]

    def gather_to_0(self, value):
        values = self._exchange(value)
        if self.rank:
            return None
        self.received.append([values[rank] for rank in range(1, self.world_size)])
        return [values[rank] for rank in range(self.world_size)]

    def scatter(self, values):
        mine = self._exchange(values)[0][self.rank]
        if self.rank:
            self.received.append(mine)
        return mine

    def broadcast(self, value, source=0):
        found = self._exchange(value)[source]
        if self.rank != source:
            self.received.append(found)
        return found

    def broadcast_bytes(self, data, source):
        return self.broadcast(data, source)


def run_ranks(
    function: Callable[[Any], Any], world_size: int = 2, kind: type[ThreadGroup] = ThreadGroup
) -> list[Any]:
    """What the function gives on each rank, or the error that it raises there; no rank waits in vain."""
    board = _Board(world_size)
    groups = [kind(board, rank, world_size) for rank in range(world_size)]

    def run(group: ThreadGroup) -> Any:
        try:
            return function(group)
        except Exception as error:
            return error

    with ThreadPoolExecutor(world_size) as pool:
        found = list(pool.map(run, groups))
    assert not any(isinstance(each, threading.BrokenBarrierError) for each in found), "a rank waited in vain"
    return found


def committer_of(group: RankGroup, storage: Storage, **fields: Any) -> Committer:
    """A committer without a lock, of a run that has saved nothing."""
    return Committer(
        **{
            "storage": storage,
            "group": group,
            "lock": None,
            "retention": Retention(),
            "merge_after": 0,
            "run_id": "run-a",
            "epoch": 0,
            "next_sequence": 1,
            "committed": [],
            "chain": [],
            **fields,
        }
    )
