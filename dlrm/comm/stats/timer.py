"""A timer of work on a device that does not wait for the device."""

import time

import torch


class DeviceTimer:
    """Adds up the seconds between `start` and `stop`, on a GPU by events in its stream."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began_s = 0.0
        self._seconds = 0.0
        self._begin: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        """Start an interval; an earlier one that was not stopped, as when work failed, does not count."""
        if self._on_gpu:
            self._begin = _event()
            self._begin.record()
        else:
            self._began_s = time.perf_counter()

    def stop(self) -> None:
        """End the interval."""
        if self._on_gpu:
            assert self._begin is not None, "start comes before stop"
            end = _event()
            end.record()
            self._events.append((self._begin, end))
            self._begin = None
        else:
            self._seconds += time.perf_counter() - self._began_s

    def take(self) -> float:
        """Return the seconds since the last call; waits for the end of the newest interval."""
        if self._events:
            self._events[-1][1].synchronize()
            self._seconds += sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
