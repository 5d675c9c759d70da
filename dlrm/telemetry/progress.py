"""What a person sees while training: a live bar in a terminal, now and then a line elsewhere."""

import logging
import time
from contextlib import ExitStack
from typing import Final, Protocol, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

LINE_EVERY_S: Final = 10.0
"""Least time between two lines where there is no terminal."""


class Progress(Protocol):
    """Shows how far a run is."""

    def advance(self, samples: int) -> None:
        """Called once a step with the samples done so far."""

    def show(self, loss: float, auc: float | None, samples_per_s: float) -> None:
        """Called when there are new figures."""

    def evaluate(self) -> None:
        """Called for each batch that is evaluated."""

    def end_evaluation(self) -> None:
        """Called when all of them are."""

    def close(self) -> None:
        """Called once at the end."""


def open_progress(total_samples: int, evaluated_batches: int, stream: TextIO) -> Progress:
    """A bar if `stream` is a terminal, else lines through logging."""
    if stream.isatty():
        return ProgressBar(total_samples, evaluated_batches, stream)
    return ProgressLines(total_samples, evaluated_batches)


class ProgressBar:
    """A bar with samples, samples/s, time left, loss and running AUC. Log messages go above it.

    While it evaluates, there is a second one below.
    """

    def __init__(self, total_samples: int, evaluated_batches: int, stream: TextIO) -> None:
        self._evaluated_batches, self._stream = evaluated_batches, stream
        self._evaluation: tqdm[None] | None = None
        self._stack = ExitStack()
        self._bar = self._stack.enter_context(
            tqdm(
                total=total_samples,
                unit=" samples",
                unit_scale=True,
                file=stream,
                dynamic_ncols=True,
            )
        )
        self._stack.enter_context(logging_redirect_tqdm())

    def advance(self, samples: int) -> None:
        """Move the bar to `samples`."""
        self._bar.update(samples - self._bar.n)

    def show(self, loss: float, auc: float | None, samples_per_s: float) -> None:
        """Put loss and AUC beside the bar, which measures samples/s itself."""
        self._bar.set_postfix_str(_quality(loss, auc), refresh=False)

    def evaluate(self) -> None:
        """Move the second bar by a batch."""
        if self._evaluation is None:
            self._evaluation = tqdm(
                total=self._evaluated_batches,
                desc="evaluation",
                unit=" batches",
                file=self._stream,
                dynamic_ncols=True,
                leave=False,
            )
        self._evaluation.update()

    def end_evaluation(self) -> None:
        """Take the second bar away."""
        if self._evaluation is not None:
            self._evaluation.close()
        self._evaluation = None

    def close(self) -> None:
        """Leave the last state of the bar on the screen."""
        self.end_evaluation()
        self._stack.close()


class ProgressLines:
    """A line of text at most every `LINE_EVERY_S` seconds; of an evaluation that takes less, none."""

    def __init__(self, total_samples: int, evaluated_batches: int) -> None:
        self._total_samples, self._evaluated_batches = total_samples, evaluated_batches
        self._samples = self._batches = 0
        self._evaluation_said_at = 0.0
        self._said_at = -float("inf")

    def advance(self, samples: int) -> None:
        """Remember how far the run is."""
        self._samples = samples

    def show(self, loss: float, auc: float | None, samples_per_s: float) -> None:
        """Log a line, unless there was one a moment ago."""
        now = time.monotonic()
        if now - self._said_at < LINE_EVERY_S:
            return
        self._said_at = now
        logger.info(
            "%s of %s samples (%.0f %%), %s samples/s, %s",
            f"{self._samples:,}",
            f"{self._total_samples:,}",
            100 * self._samples / max(self._total_samples, 1),
            f"{samples_per_s:,.0f}",
            _quality(loss, auc),
        )

    def evaluate(self) -> None:
        """Log a line if the last one, or the beginning, is long ago."""
        now = time.monotonic()
        if self._batches == 0:
            self._evaluation_said_at = now
        self._batches += 1
        if now - self._evaluation_said_at >= LINE_EVERY_S:
            self._evaluation_said_at = now
            share = 100 * self._batches / max(self._evaluated_batches, 1)
            logger.info("evaluation: batch %d of %d (%.0f %%)", self._batches, self._evaluated_batches, share)

    def end_evaluation(self) -> None:
        """The next one begins at its first batch."""
        self._batches = 0

    def close(self) -> None:
        """Nothing to release."""


def _quality(loss: float, auc: float | None) -> str:
    return f"loss {loss:.4f}, AUC {'--' if auc is None else f'{auc:.4f}'}"
