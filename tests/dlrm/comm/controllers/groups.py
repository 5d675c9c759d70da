"""Simulated ranks: threads of one process that synchronize at a barrier."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch


class Alone:
    """Sums over ranks that all have the same values."""

    def __init__(self, num_ranks=1):
        self.num_ranks = num_ranks

    def __call__(self, values):
        return [self.num_ranks * value for value in values.tolist()]


class Member:
    """One of several ranks; `sums` counts its exchanges."""

    def __init__(self, rank, slots, barrier):
        self.rank, self.num_ranks = rank, len(slots)
        self._slots, self._barrier = slots, barrier
        self.sums = 0

    def __call__(self, values):
        return self.total(values).tolist()

    def total(self, values):
        """The sum over ranks, added in order of rank."""
        self.sums += 1
        self._slots[self.rank] = values.clone()
        self._barrier.wait()
        assert len({value.shape for value in self._slots}) == 1, "ranks exchange different things"
        total = torch.stack(self._slots).sum(dim=0)
        self._barrier.wait()
        return total


def together(num_ranks, work):
    """Run `work(member)` on each rank; a rank that waits for others too long fails the test."""
    slots, barrier = [None] * num_ranks, threading.Barrier(num_ranks, timeout=20)
    members = [Member(rank, slots, barrier) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as threads:
        done = [threads.submit(partial(work, member)) for member in members]
        return [each.result() for each in done]
