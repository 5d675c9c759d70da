"""How good any model could be: AUC and log loss of the true click probabilities.

The best reachable AUC of a set of samples is the AUC of the Bayes-optimal score: the true click
probability given all the features that a model sees, on the labels that were drawn. Its expectation
over the labels is kept beside it. No model can have a better one but by luck with these labels. The
best log loss is that of the same probabilities.

Samples are counted in bins of equal probability width, so a day of any size takes the same small
memory; two samples of one bin count as a tie, which moves the AUC by less than 1e-5.
"""

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

NUM_BINS: Final = 4096

Floats = npt.NDArray[np.float64]


def _zeros(size: int) -> Any:
    return field(default_factory=lambda: np.zeros(size))


@dataclass
class Scores:
    """Counts that add up over samples."""

    rows: Floats = _zeros(NUM_BINS)
    """Samples in each bin of the true probability."""
    clicks: Floats = _zeros(NUM_BINS)
    """Clicks in each bin."""
    expected_clicks: Floats = _zeros(NUM_BINS)
    """Sum of the true probabilities in each bin."""
    log_loss_sum: Floats = _zeros(1)
    """Sum of the log loss of the samples, in nats."""

    def add(self, probabilities: Floats, labels: npt.NDArray[np.int8]) -> None:
        """Count samples with these true probabilities, strictly between 0 and 1, and labels."""
        bins = np.minimum((probabilities * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        self.rows += np.bincount(bins, minlength=NUM_BINS)
        self.clicks += np.bincount(bins, weights=labels, minlength=NUM_BINS)
        self.expected_clicks += np.bincount(bins, weights=probabilities, minlength=NUM_BINS)
        self.log_loss_sum -= np.log(np.where(labels == 1, probabilities, 1 - probabilities)).sum()

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(**{name: value + getattr(other, name) for name, value in vars(self).items()})

    def summary(self) -> dict[str, float | None]:
        """The figures that a data set's provenance holds; an AUC is None if there is only one label."""
        rows = float(self.rows.sum())
        return {
            "best_auc": _auc(self.clicks, self.rows - self.clicks),
            "best_auc_expected": _auc(self.expected_clicks, self.rows - self.expected_clicks),
            "best_log_loss": float(self.log_loss_sum[0]) / rows,
            "click_rate": float(self.clicks.sum()) / rows,
        }


def _auc(positives: Floats, negatives: Floats) -> float | None:
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return None
    below = np.cumsum(negatives) - negatives / 2
    return float((positives * below).sum() / pairs)
