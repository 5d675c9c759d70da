"""Progress of a run for people: a live bar in a terminal, or a log line every few seconds elsewhere."""

import logging
import time
from contextlib import ExitStack
from typing import Final, Protocol, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

LINE_EVERY_S: Final = 10.0
"""Least time between two log lines where there is no terminal."""


class TrainingProgress(Protocol):
    """Shows how far a run and its evaluations are."""

    def advance(self, samples: int) -> None:
        """Called once a step with the samples done so far."""

    def show(self, loss: float, auc: float | None, samples_per_s: float) -> None:
        """Called when there is a new line of metrics."""

    def evaluate(self) -> None:
        """Called for each evaluated batch."""

    def end_evaluation(self) -> None:
        """Called after the last evaluated batch."""

    def close(self) -> None:
        """Called once at the end of the run."""


def open_progress(total_samples: int, evaluated_batches: int, stream: TextIO) -> TrainingProgress:
    """Open a bar if `stream` is a terminal, else log lines."""
    if stream.isatty():
        return _ProgressBar(total_samples, evaluated_batches, stream)
    return _ProgressLines(total_samples, evaluated_batches)


class _ProgressBar:
    """A bar with samples, speed, time left, loss and AUC; a second one below it during an evaluation."""

    def __init__(self, total_samples: int, evaluated_batches: int, stream: TextIO) -> None:
        self._evaluated_batches, self._stream = evaluated_batches, stream
        self._evaluation: tqdm[None] | None = None
        self._stack = ExitStack()
        bar = tqdm(total=total_samples, unit=" samples", unit_scale=True, file=stream, dynamic_ncols=True)
        self._bar = self._stack.enter_context(bar)
        self._stack.enter_context(logging_redirect_tqdm())  # log messages appear above the bar

    def advance(self, samples: int) -> None:
        self._bar.update(samples - self._bar.n)

    def show(self, loss: float, auc: float | None, samples_per_s: float) -> None:
        self._bar.set_postfix_str(_quality(loss, auc), refresh=False)  # the bar measures samples/s itself

    def evaluate(self) -> None:
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
        if self._evaluation is not None:
            self._evaluation.close()
        self._evaluation = None

    def close(self) -> None:
        self.end_evaluation()
        self._stack.close()


class _ProgressLines:
    """A log line at most every `LINE_EVERY_S` seconds; none for an evaluation that takes less."""

    def __init__(self, total_samples: int, evaluated_batches: int) -> None:
        self._total_samples, self._evaluated_batches = total_samples, evaluated_batches
        self._samples = self._batches = 0
        self._evaluation_logged_at = 0.0
        self._logged_at = -float("inf")

    def advance(self, samples: int) -> None:
        self._samples = samples

    def show(self, loss: float, auc: float | None, samples_per_s: float) -> None:
        now = time.monotonic()
        if now - self._logged_at < LINE_EVERY_S:
            return
        self._logged_at = now
        logger.info(
            "%s of %s samples (%.0f %%), %s samples/s, %s",
            f"{self._samples:,}",
            f"{self._total_samples:,}",
            100 * self._samples / max(self._total_samples, 1),
            f"{samples_per_s:,.0f}",
            _quality(loss, auc),
        )

    def evaluate(self) -> None:
        now = time.monotonic()
        if self._batches == 0:
            self._evaluation_logged_at = now
        self._batches += 1
        if now - self._evaluation_logged_at >= LINE_EVERY_S:
            self._evaluation_logged_at = now
            share = 100 * self._batches / max(self._evaluated_batches, 1)
            logger.info("evaluation: batch %d of %d (%.0f %%)", self._batches, self._evaluated_batches, share)

    def end_evaluation(self) -> None:
        self._batches = 0

    def close(self) -> None:
        pass


def _quality(loss: float, auc: float | None) -> str:
    return f"loss {loss:.4f}, AUC {'--' if auc is None else f'{auc:.4f}'}"
