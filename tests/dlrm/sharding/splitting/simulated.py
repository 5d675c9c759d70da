"""Ranks as threads of one process, with a barrier in place of a network."""

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import torch
from torch import Tensor

from dlrm.sharding.splitting.exchange import SplitExchange


class SimulatedExchange(SplitExchange):
    """An exchange whose collectives hand tensors from thread to thread, of any dtype."""

    def __init__(self, rank: int, mailbox: list[Any], barrier: Barrier) -> None:
        self.rank, self.world_size, self.wire_dtype = rank, len(mailbox), None
        self._mailbox, self._barrier = mailbox, barrier

    def _from_all(self, own: Any) -> list[Any]:
        self._mailbox[self.rank] = own
        self._barrier.wait(timeout=30)
        found = list(self._mailbox)
        self._barrier.wait(timeout=30)
        return found

    def all_to_all(self, sent: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
        pieces = [every[self.rank] for every in self._from_all(sent.detach().split(list(to_each)))]
        assert [len(piece) for piece in pieces] == list(from_each)
        return torch.cat(pieces)

    def gather(self, own: Tensor, batch_sizes: list[int]) -> Tensor:
        return torch.cat(self._from_all(own.detach()))

    def all_reduce(self, partial: Tensor) -> Tensor:
        return torch.stack(self._from_all(partial.detach())).sum(0)


def on_ranks(world_size: int, work: Callable[[SimulatedExchange], Any]) -> list[Any]:
    """What `work` returns on each rank; the first error of a rank is raised."""
    mailbox, barrier = [None] * world_size, Barrier(world_size)
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(SimulatedExchange(rank, mailbox, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
