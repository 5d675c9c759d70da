"""A background thread that watches a save, for `experiments.checkpointing`, and memory functions."""

import gc
from threading import Event, Thread
from time import perf_counter
from typing import Final

import psutil

from experiments.checkpointing.baselines import Saver

POLL_S: Final = 0.01


class SaveWatch:
    """A thread that measures the time of a save's commit and the peak memory of the process until then."""

    def __init__(self, saver: Saver) -> None:
        self.committed_at = 0.0
        self.peak_bytes = resident_bytes()
        self._saver = saver
        self._stop = Event()
        self._thread = Thread(target=self._run, daemon=True)

    def __enter__(self) -> "SaveWatch":
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
    """Resident set size of this process."""
    found: int = psutil.Process().memory_info().rss
    return found


def give_memory_back() -> None:
    """Return freed memory to the system, so that a later need for it shows in the resident set size."""
    gc.collect()
    psutil.heap_trim()
