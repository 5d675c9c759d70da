"""Watching one save from a thread beside it, for `experiments.checkpointing`."""

import ctypes
import gc
from threading import Event, Thread
from time import perf_counter
from typing import Final

import psutil

from experiments.checkpointing.baselines import Saver

POLL_S: Final = 0.01


class Watch:
    """A thread that watches one save: when it is committed, and the most memory that is taken meanwhile."""

    def __init__(self, saver: Saver) -> None:
        self.committed_at = 0.0
        self.peak_bytes = resident_bytes()
        self._saver = saver
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        seen_open = False
        while not self._stop.wait(POLL_S):
            self.peak_bytes = max(self.peak_bytes, resident_bytes())
            if not self._saver.committed:
                seen_open = True
            elif seen_open and not self.committed_at:
                self.committed_at = perf_counter()


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    found: int = psutil.Process().memory_info().rss
    return found


def give_memory_back() -> None:
    """Free memory goes to the system, so that whoever needs it next is seen to take it."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
