"""Figures of exchanges for telemetry and reports."""

from dataclasses import dataclass


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
    """Adds up the figures of steps until they are taken."""

    def __init__(self) -> None:
        self._steps = self._timed_steps = self._num_kept = self._num_values = 0
        self._seconds = self._step_seconds = self._sent_bytes = 0.0

    def exchange(self, num_kept: int, num_values: int, sent_bytes: float) -> None:
        """Count an exchange, in which this rank sent `num_kept` values and ranks on average `sent_bytes`."""
        self._steps += 1
        self._num_kept += num_kept
        self._num_values += num_values
        self._sent_bytes += sent_bytes

    def waited(self, seconds: float) -> None:
        """Add seconds of exchanges."""
        self._seconds += seconds

    def step(self, seconds: float) -> None:
        """Add the seconds of a whole step."""
        self._timed_steps += 1
        self._step_seconds += seconds

    def take(self, name: str, residual_energy: float | None = None) -> ExchangeFigures | None:
        """Return the means since the last call and start over; None if there was no exchange."""
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
        self.__init__()  # type: ignore[misc]
        return figures
