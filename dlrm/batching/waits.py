"""Measures how long a thread waits for other ranks, inside whatever library makes it wait."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

from torch.distributed import Work


@contextmanager
def timed_waits() -> Iterator[Callable[[], float]]:
    """Yield a function that returns the seconds in which this thread has waited for collectives so far.

    TorchRec's exchanges of ids and embeddings wait in the forward and backward passes. PyTorch has no hook
    there, so that `Work.wait`, which all of them call, is replaced for the duration. What C++ waits for is
    not seen: the averaging of replicated tables by `DistributedDataParallel`.
    """
    waited_s, thread, wait = 0.0, get_ident(), Work.wait

    def timed(work: Work, *arguments: Any, **named: Any) -> Any:
        nonlocal waited_s
        if get_ident() != thread:
            return wait(work, *arguments, **named)
        began = perf_counter()
        try:
            return wait(work, *arguments, **named)
        finally:
            waited_s += perf_counter() - began

    Work.wait = timed  # type: ignore[method-assign, assignment]
    try:
        yield lambda: waited_s
    finally:
        Work.wait = wait  # type: ignore[method-assign]
