"""Read-ahead: a thread that fetches the row groups that the consumer will request next.

While the consumer works on one row group, the storage already delivers the next one. A limit bounds the
number of row groups that are ready or being fetched. An error is raised when its row group is requested.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Final

import pyarrow as pa

from data.loader.background import CLOSE_S, Background

AHEAD: Final = 3
"""Maximum of row groups that are ready or being fetched: the next one and two after it."""


class ReadAhead:
    """Runs fetches in order in a background thread."""

    def __init__(self) -> None:
        self._background = Background("cache-read-ahead")
        self._futures: OrderedDict[str, Future[pa.Table | None]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, key: str, fetch: Callable[[], pa.Table | None]) -> None:
        """Fetch `key` in the background, unless it is being fetched or `AHEAD` others are waiting."""
        with self._lock:
            if key not in self._futures and self._has_room():
                self._futures[key] = self._background.submit(fetch)

    def take(self, key: str) -> pa.Table | None:
        """Wait for the fetch of `key` and return its table; None if there was no such fetch.

        Raises:
            Exception: the error of the fetch.
        """
        with self._lock:
            future = self._futures.pop(key, None)
        try:
            return future and future.result()
        except CancelledError:  # closed meanwhile
            return None

    def close(self) -> None:
        """Drop all row groups and end the thread."""
        self._background.close(CLOSE_S)
        with self._lock:
            self._futures.clear()

    def _has_room(self) -> bool:
        """Whether one more fetch may start, after dropping the oldest table that no reader has taken."""
        if len(self._futures) < AHEAD:
            return True
        forgotten = next((key for key, future in self._futures.items() if future.done()), None)
        return forgotten is not None and self._futures.pop(forgotten) is not None
