"""One thread that exchanges slices of a gradient with the other ranks, in an order that all ranks share.

Collectives must be issued in the same order everywhere, or ranks wait for each other for ever. So nobody
decides by what happens to be ready: for a few rounds slices go in the order of their numbers while rank 0
takes times, then rank 0's answer to what should go first is broadcast, by this very thread, and that
order stays. A slice that is not ready is waited for, whatever else is.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

MEASURED_ROUNDS: Final = 3
"""Rounds before the order is agreed; the first ones also warm up."""
CLOSE_WITHIN_S: Final = 5.0
"""How long `close` waits for an exchange that others may never join; the thread is a daemon."""


class ExchangeError(RuntimeError):
    """An exchange with the other ranks failed; the message names the slice, and the cause is chained."""


class CommThread:
    """Exchanges each slice once a round.

    Args:
        names: of the slices, for people.
        parts: of each slice: how often it is marked in a round until it is ready.
        send: exchanges the slice of that number, in place.
        agree: from when each slice was ready and how long its exchange took, in seconds, on this rank, to the
            order of all slices, equal on all ranks, which call it together. Runs in the courier's thread.
    """

    def __init__(
        self,
        names: Sequence[str],
        parts: Sequence[int],
        send: Callable[[int], None],
        agree: Callable[[Sequence[float], Sequence[float]], Sequence[int]],
    ) -> None:
        self._names, self._parts, self._send, self._agree = names, parts, send, agree
        self._missing = list(parts)
        self._done = [0] * len(names)
        self._ready_s = [0.0] * len(names)
        self._takes_s = [float("inf")] * len(names)
        self._changed = threading.Condition()
        self._failed: tuple[str, BaseException] | None = None
        self._closing = False
        self.order: Sequence[int] = range(len(names))
        """In which slices go, by number; for tests and for people."""
        self.is_measuring = True
        """Whether times are taken."""
        self._thread = threading.Thread(target=self._run, name="gradient courier", daemon=True)
        self._thread.start()

    def mark(self, index: int) -> None:
        """One more part of a slice is ready."""
        with self._changed:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._ready_s[index] = time.perf_counter()
                self._changed.notify_all()

    def wait(self, index: int, rounds: int) -> None:
        """Until a slice has been exchanged in so many rounds.

        Raises:
            ExchangeError: that cannot be any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done[index] >= rounds or self._failed or self._closing)
        if self._done[index] < rounds:
            self.check()
            raise ExchangeError(f"{self._names[index]} was not exchanged before the exchange was closed")

    def check(self) -> None:
        """Tell of an exchange that failed.

        Raises:
            ExchangeError: one has.
        """
        if self._failed:
            name, cause = self._failed
            raise ExchangeError(f"the exchange of {name} with the other ranks failed: {cause}") from cause

    def close(self) -> None:
        """End the thread; what is not ready is never sent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_WITHIN_S)

    def _run(self) -> None:
        doing = ""
        try:
            for rounds in itertools.count(1):
                for index in self.order:
                    doing = f"{self._names[index]} in step {rounds}"
                    if not self._becomes_ready(index):
                        return
                    begin = time.perf_counter()
                    self._send(index)
                    took_s = time.perf_counter() - begin
                    # the shortest: others that come late make it longer, whatever the slice
                    self._takes_s[index] = min(self._takes_s[index], took_s)
                    self._tell_done(index)
                if rounds == MEASURED_ROUNDS:
                    doing = "the order of slices"
                    self.order = self._agree(self._ready_s, self._takes_s)
                    self.is_measuring = False
        except BaseException as error:
            with self._changed:
                self._failed = doing, error
                self._changed.notify_all()

    def _becomes_ready(self, index: int) -> bool:
        """Wait for all parts of a slice; false: the courier is closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing[index] == 0 or self._closing)
            return not self._closing

    def _tell_done(self, index: int) -> None:
        with self._changed:
            self._missing[index] = self._parts[index]
            self._done[index] += 1
            self._changed.notify_all()
