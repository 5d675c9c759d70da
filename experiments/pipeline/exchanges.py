"""What a step's exchanges take: seconds that the main thread spends in them by clock, and by formula."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Final
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm.dense_sync.base import DenseSync
from dlrm.sharding.splitting.wire import COUNTS, sent_by

IDS, FORWARD, BACKWARD, DENSE = "ids", "forward", "backward", "dense"
KINDS: Final = (IDS, FORWARD, BACKWARD, DENSE)
"""Exchanges of a step: of ids and their counts; of pooled embeddings or partial results; of their gradients;
of dense gradients."""


class ExchangeClock:
    """Seconds that this process has spent in collectives and in waiting for them, by kind.

    Args:
        counts: whether to count calls and bytes as well, which takes time.
    """

    def __init__(self, counts: bool) -> None:
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.calls = dict.fromkeys(KINDS, 0)
        self.sent_bytes = dict.fromkeys(KINDS, 0.0)
        self._counts = counts
        self._running: dict[int, str] = {}
        self._is_dense = False

    def dense(self, average: Callable[[Tensor], Tensor], scalars: Tensor) -> Tensor:
        """Call `DenseSync.average`, all of which is the exchange of dense gradients."""
        began, self._is_dense = perf_counter(), True
        averaged = average(scalars)
        self.seconds[DENSE] += perf_counter() - began
        self._is_dense = False
        return averaged

    def call(self, name: str, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Call a collective of `torch.distributed`."""
        first = next(iter((*arguments, *named.values())))
        kind = self._kind(first if isinstance(first, Tensor) else first[0])
        if self._counts:
            self.calls[kind] += 1
            self.sent_bytes[kind] += sent_by(name, original, *arguments, **named)[1]
        began = perf_counter()
        work = original(*arguments, **named)
        self._add(kind, perf_counter() - began)
        if work is not None:
            self._running[id(work)] = kind
        return work

    def wait(self, original: Callable[..., bool], work: Any, *arguments: Any) -> bool:
        """Wait for a collective; `work` is what it returned."""
        kind = self._running.pop(id(work), None)
        began = perf_counter()
        result = original(work, *arguments)
        if kind is not None:  # none inside a collective that waits itself, which `call` times
            self._add(kind, perf_counter() - began)
        return result

    def _kind(self, tensor: Tensor) -> str:
        if self._is_dense:
            return DENSE
        if not tensor.dtype.is_floating_point and tensor.dtype != torch.uint8:  # codecs make uint8 of values
            return IDS
        return FORWARD if torch._C._current_graph_task_id() == -1 else BACKWARD

    def _add(self, kind: str, seconds: float) -> None:
        if kind != DENSE:  # which is timed as a whole
            self.seconds[kind] += seconds


@contextmanager
def clocked(synchronizer: DenseSync, counts: bool = False) -> Iterator[ExchangeClock]:
    """Time all collectives that Python calls inside this block, TorchRec's and this project's.

    Not seen are gradients of replicated tables, which DistributedDataParallel averages inside C++.

    Args:
        synchronizer: of the dense parameters.
        counts: see `ExchangeClock`.
    """
    clock = ExchangeClock(counts)
    with ExitStack() as stack:
        for name in COUNTS:
            if hasattr(dist, name):
                timed = partial(clock.call, name, getattr(dist, name))
                stack.enter_context(patch.object(dist, name, timed))
        wait = dist.Work.wait
        stack.enter_context(patch.object(dist.Work, "wait", lambda *arguments: clock.wait(wait, *arguments)))
        average = partial(clock.dense, synchronizer.average)
        stack.enter_context(patch.object(synchronizer, "average", average))
        yield clock


def latency_s(calls: int = 30) -> float:
    """Median seconds of an all-to-all of one number for each rank; a collective."""
    sent = torch.zeros(dist.get_world_size())
    took_s = []
    for _ in range(calls):
        began = perf_counter()
        dist.all_to_all_single(torch.empty_like(sent), sent)
        took_s.append(perf_counter() - began)
    return sorted(took_s)[calls // 2]


def formula_s(num_bytes: float, calls: float, gbit_per_s: float | None, latency: float) -> float:
    """Seconds of `calls` exchanges one after the other that send `num_bytes` in all over a link.

    Args:
        num_bytes: that a rank sends.
        calls: collectives, each of which takes `latency` seconds without any bytes.
        gbit_per_s: speed of the link; None: bytes take no time.
        latency: see `calls`.
    """
    return calls * latency + (8e-9 * num_bytes / gbit_per_s if gbit_per_s else 0.0)
