"""Progress of a run for people: a live bar in a terminal, or a log line every few seconds elsewhere."""

import logging
import time
from contextlib import ExitStack
from typing import Final, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

logger = logging.getLogger(__name__)

LINE_EVERY_S: Final = 10.0
"""Least time between two log lines where there is no terminal."""


class TrainingProgress:
    """A bar with samples, speed, time left, loss and AUC; a second one below it during an evaluation.

    If `stream` is no terminal, a log line at most every `LINE_EVERY_S` seconds, and none for an evaluation
    that takes less.
    """

    def __init__(self, total_samples: int | None, evaluated_batches: int, stream: TextIO) -> None:
        self._total_samples, self._evaluated_batches = total_samples, evaluated_batches
        self._is_terminal = stream.isatty()
        self._options = {"file": stream, "dynamic_ncols": True, "disable": not self._is_terminal}
        self._samples = self._batches = 0
        self._logged_at, self._evaluation_logged_at = -float("inf"), 0.0
        self._evaluation: tqdm[None] | None = None
        self._stack = ExitStack()
        self._bar = self._stack.enter_context(
            tqdm(total=total_samples, unit=" samples", unit_scale=True, **self._options)
        )
        if self._is_terminal:
            self._stack.enter_context(logging_redirect_tqdm())  # log messages appear above the bar

    def advance(self, samples: int) -> None:
        """Called once a step with the samples done so far."""
        self._bar.update(samples - self._samples)
        self._samples = samples

    def show(self, quality: str, samples_per_s: float) -> None:
        """Called when there is a new line of metrics, such as `loss 0.4512, AUC 0.7631`."""
        self._bar.set_postfix_str(quality, refresh=False)  # the bar measures samples/s itself
        now = time.monotonic()
        if self._is_terminal or now - self._logged_at < LINE_EVERY_S:
            return
        self._logged_at = now
        total = self._total_samples
        of_all = "" if total is None else f" of {total:,}"
        share = "" if total is None else f" ({100 * self._samples / max(total, 1):.0f} %)"
        logger.info(
            "%s%s samples%s, %s samples/s, %s",
            f"{self._samples:,}",
            of_all,
            share,
            f"{samples_per_s:,.0f}",
            quality,
        )

    def evaluate(self) -> None:
        """Called for each evaluated batch."""
        now, total = time.monotonic(), self._evaluated_batches
        if self._evaluation is None:
            self._batches, self._evaluation_logged_at = 0, now
            self._evaluation = tqdm(
                total=total, desc="evaluation", unit=" batches", leave=False, **self._options
            )
        self._batches += 1
        self._evaluation.update()
        if not self._is_terminal and now - self._evaluation_logged_at >= LINE_EVERY_S:
            self._evaluation_logged_at = now
            share = 100 * self._batches / max(total, 1)
            logger.info("evaluation: batch %d of %d (%.0f %%)", self._batches, total, share)

    def end_evaluation(self) -> None:
        """Called after the last evaluated batch."""
        if self._evaluation is not None:
            self._evaluation.close()
        self._evaluation = None

    def close(self) -> None:
        """Called once at the end of the run."""
        self.end_evaluation()
        self._stack.close()
