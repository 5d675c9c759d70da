"""What exchanges took: for telemetry, for reports, and to tell whether they are worth a thought."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExchangeFigures:
    """What exchanges took on this rank, on average over some steps."""

    name: str
    """How it was done."""
    steps: int
    seconds: float
    """That a step has waited for its exchange, slower ranks included."""
    step_seconds: float
    """Of the steps as a whole; 0: nobody has told."""
    kept_share: float
    """Of the gradient's values that a rank has sent; 1: all of them."""
    sent_bytes: float
    """That a rank has sent to others in a step, on average over ranks, by formula."""
    residual_energy: float | None = None
    """Sum of the squares of all that all ranks owed when that was last measured; None: never yet."""

    @property
    def share(self) -> float | None:
        """Of the step; None: not known."""
        return self.seconds / self.step_seconds if self.step_seconds else None


class Tally:
    """Adds up figures of steps until somebody asks."""

    def __init__(self) -> None:
        self._steps = self._timed_steps = self._num_kept = self._num_values = 0
        self._seconds = self._step_seconds = self._sent_bytes = 0.0

    def exchange(self, num_kept: int, num_values: int, sent_bytes: float) -> None:
        """One more exchange, in which this rank sent so many of so many values, and a rank so many bytes."""
        self._steps += 1
        self._num_kept += num_kept
        self._num_values += num_values
        self._sent_bytes += sent_bytes

    def waited(self, seconds: float) -> None:
        """So much longer for exchanges."""
        self._seconds += seconds

    def step(self, seconds: float) -> None:
        """A whole step took so long."""
        self._timed_steps += 1
        self._step_seconds += seconds

    def take(self, name: str, residual_energy: float | None = None) -> ExchangeFigures | None:
        """The means since this was last asked; None if there was no exchange."""
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
        self.__init__()  # type: ignore[misc]  # begin anew
        return figures
