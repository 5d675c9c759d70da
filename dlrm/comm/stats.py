"""Bytes and seconds of exchanges, for telemetry and reports."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class ExchangeFigures:
    """Bytes and seconds of this rank's exchanges, averaged over steps."""

    name: str
    """Name of the collective."""
    steps: int
    seconds: float
    """Seconds that a step has waited for its exchange, and for slower ranks."""
    step_seconds: float
    """Seconds of whole steps; 0: unknown."""
    kept_share: float
    """Share of the gradient's values that a rank has sent."""
    sent_bytes: float
    """Bytes that a rank has sent in a step, on average over ranks, by formula."""
    residual_energy: float | None = None
    """Sum of the squares of all ranks' residuals, when last measured; None: never measured."""

    @property
    def share(self) -> float | None:
        """Share of the step spent in the exchange; None: unknown."""
        return self.seconds / self.step_seconds if self.step_seconds else None


class Tally:
    """Adds up the figures of steps until they are taken; exchanges are timed between `start` and `stop`.

    On a GPU they are timed by events in its stream, for which nothing waits before the time is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._began_s = 0.0
        self._untaken_s = 0.0
        self._begin: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._clear()

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
            self._untaken_s += time.perf_counter() - self._began_s

    def take_seconds(self, late: bool = False) -> float:
        """Return the seconds of intervals since the last call; waits for the end of the newest one.

        If `late`, the newest one of a GPU is left for the next call, and the one before has long ended.
        """
        taken = self._events[: len(self._events) - late]
        if taken:
            taken[-1][1].synchronize()
            self._untaken_s += sum(begin.elapsed_time(end) for begin, end in taken) / 1e3
            del self._events[: len(taken)]
        seconds, self._untaken_s = self._untaken_s, 0.0
        self.waited(seconds)
        return seconds

    def waited(self, seconds: float) -> None:
        """Add seconds of exchanges that were not timed here."""
        self._seconds += seconds

    def exchange(self, num_kept: int, num_values: int, sent_bytes: float) -> None:
        """Count an exchange, in which this rank sent `num_kept` values and ranks on average `sent_bytes`."""
        self._steps += 1
        self._num_kept += num_kept
        self._num_values += num_values
        self._sent_bytes += sent_bytes

    def step(self, seconds: float) -> None:
        """Add the seconds of a whole step."""
        self._timed_steps += 1
        self._step_seconds += seconds

    def take(self, name: str, residual_energy: float | None = None) -> ExchangeFigures | None:
        """Return the means since the last call and start over; None if there was no exchange."""
        self.take_seconds()
        if self._steps == 0:
            return None
        figures = ExchangeFigures(
            name=name,
            steps=self._steps,
            seconds=self._seconds / self._steps,
            step_seconds=self._step_seconds / max(self._timed_steps, 1),
            kept_share=self._num_kept / max(self._num_values, 1),
            sent_bytes=self._sent_bytes / self._steps,
            residual_energy=residual_energy,
        )
        self._clear()
        return figures

    def _clear(self) -> None:
        self._steps = self._timed_steps = self._num_kept = self._num_values = 0
        self._seconds = self._step_seconds = self._sent_bytes = 0.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
