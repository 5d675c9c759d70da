"""Seconds of a stretch of work on a device, without waiting for it."""

import time

import torch


class DeviceTimer:
    """Adds up the seconds of stretches of work, on a GPU as the GPU went through them.

    Args:
        device: that works.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began_s = 0.0
        self._seconds = 0.0
        self._begin: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """A stretch begins; one that was begun before and not ended, as where work failed, does not count."""
        if self._on_gpu:
            self._begin = _event()
            self._begin.record()
        else:
            self._began_s = time.perf_counter()

    def stop(self) -> None:
        """The stretch is over."""
        if self._on_gpu:
            assert self._begin is not None, "a stretch begins before it ends"
            end = _event()
            end.record()
            self._events.append((self._begin, end))
            self._begin = None
        else:
            self._seconds += time.perf_counter() - self._began_s

    def take(self) -> float:
        """The seconds since this was last asked; waits for the end of the newest stretch."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
