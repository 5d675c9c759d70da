"""A background thread that exchanges slices of a gradient, in an order that all ranks share.

Collectives must be issued in the same order on all ranks, or these deadlock. For a few rounds slices are sent
in the order of their numbers while rank 0 measures times; then this thread broadcasts the order that rank 0
has computed, which stays. The thread waits for the next slice in order even if others are ready.
"""

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

import torch

MEASURED_ROUNDS: Final = 3
"""Rounds before ranks agree on an order; the first ones also warm up."""
CLOSE_WITHIN_S: Final = 5.0
"""Timeout of `close` for an exchange that other ranks may never join; the thread is a daemon."""


class ExchangeError(RuntimeError):
    """An exchange with the other ranks failed; the message names the slice, and the cause is chained."""


class CommThread:
    """Exchanges each slice once per round, in a thread of its own.

    Args:
        names: of the slices, for messages.
        parts: how often each slice is marked in a round until it is ready.
        send: exchanges the slice of a number, in place.
        agree: called in the thread, on all ranks together, with the seconds at which each slice was ready and
            that its exchange took on this rank; returns the order of slices, the same on all ranks.
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
        """Numbers of the slices in the order in which they are sent."""
        self.is_measuring = True
        """Whether times are measured."""
        self._thread = threading.Thread(target=self._run, name="gradient exchange", daemon=True)
        self._thread.start()

    def mark(self, index: int) -> None:
        """Count one more part of a slice as ready."""
        with self._changed:
            self._missing[index] -= 1
            if self._missing[index] == 0:
                self._ready_s[index] = time.perf_counter()
                self._changed.notify_all()

    def end_step(self) -> None:
        """Do nothing: slices are sent as they become ready."""

    def wait(self, index: int, rounds: int) -> None:
        """Wait until a slice has been exchanged in `rounds` rounds.

        Raises:
            ExchangeError: an exchange failed, or the thread was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._done[index] >= rounds or self._failed or self._closing)
        if self._done[index] < rounds:
            self.check()
            raise ExchangeError(f"{self._names[index]} was not exchanged before the exchange was closed")

    def check(self) -> None:
        """Raise an `ExchangeError` if an exchange has failed."""
        if self._failed:
            name, cause = self._failed
            raise ExchangeError(f"the exchange of {name} with the other ranks failed: {cause}") from cause

    def close(self) -> None:
        """End the thread; slices that are not ready are never sent."""
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
                    if not self._wait_until_ready(index):
                        return  # closed
                    begin = time.perf_counter()
                    self._send(index)
                    took_s = time.perf_counter() - begin
                    # the shortest time, as ranks that come late only make it longer
                    self._takes_s[index] = min(self._takes_s[index], took_s)
                    self._mark_done(index)
                if rounds == MEASURED_ROUNDS:
                    doing = "the order of slices"
                    # between two rounds, when no other collective of this group is under way
                    self.order = self._agree(self._ready_s, self._takes_s)
                    self.is_measuring = False
        except BaseException as error:  # whatever ends this thread, waiting calls must learn of it
            with self._changed:
                self._failed = doing, error
                self._changed.notify_all()

    def _wait_until_ready(self, index: int) -> bool:
        """Wait for all parts of a slice; false if the thread is closed instead."""
        with self._changed:
            self._changed.wait_for(lambda: self._missing[index] == 0 or self._closing)
            return not self._closing

    def _mark_done(self, index: int) -> None:
        with self._changed:
            self._missing[index] = self._parts[index]
            self._done[index] += 1
            self._changed.notify_all()


class StepSender:
    """Sends all slices at the end of a step, from the thread that trains; what `CommThread` is for NCCL.

    NCCL may deadlock unless all ranks start the collectives of all their groups in one order. The training
    loop starts others, which a thread of its own would precede on one rank and follow on another. NCCL's
    calls only queue work, so that slices are still sent during the next forward pass.

    The arguments are those of `CommThread`; `agree` is called once, after the first step.
    """

    is_measuring = False

    def __init__(
        self,
        names: Sequence[str],
        parts: Sequence[int],
        send: Callable[[int], None],
        agree: Callable[[Sequence[float], Sequence[float]], Sequence[int]],
    ) -> None:
        self._send, self._agree = send, agree
        self._is_agreed = False
        self.order: Sequence[int] = range(len(names))
        """Numbers of the slices in the order in which they are sent."""

    def mark(self, index: int) -> None:
        """Do nothing: slices are sent at the end of the step."""

    def end_step(self) -> None:
        """Send all slices."""
        for index in self.order:
            self._send(index)
        if not self._is_agreed:
            nothing = [0.0] * len(self.order)
            self.order, self._is_agreed = self._agree(nothing, nothing), True

    def wait(self, index: int, rounds: int) -> None:
        """Do nothing: the stream that uses a slice waits for it (`SideStream.take`)."""

    def check(self) -> None:
        """Do nothing: a failed exchange raises in `end_step`."""

    def close(self) -> None:
        """Do nothing: there is no thread."""


class SideStream:
    """A CUDA stream for the background thread; does nothing on the CPU.

    Calls only queue work on a GPU. Tensors that one thread passes to another therefore need an event, for
    which the other thread's stream waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._given: dict[int, torch.cuda.Event] = {}
        self._returned: dict[int, torch.cuda.Event] = {}

    def give(self, key: int, finish: bool) -> None:
        """Record that the calling thread's queued work makes an input of background work ready.

        `finish` is to wait until it is ready, so that times can be measured.
        """
        if self._stream is not None:
            self._given[key] = torch.cuda.current_stream(self._device).record_event()
            if finish:
                self._given[key].synchronize()

    @contextlib.contextmanager
    def background(self, keys: Iterable[int], number: int, finish: bool) -> Iterator[None]:
        """Run background work on the side stream, after the inputs `keys`, which were given.

        `number` identifies the work for `take`, and `finish` is to wait until it is done.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            for key in keys:
                self._stream.wait_event(self._given[key])
            yield
            self._returned[number] = self._stream.record_event()
            if finish:
                self._returned[number].synchronize()

    def take(self, numbers: Iterable[int]) -> None:
        """Queue the calling thread's next work after these pieces of background work."""
        if self._stream is not None:
            for number in numbers:
                torch.cuda.current_stream(self._device).wait_event(self._returned[number])
