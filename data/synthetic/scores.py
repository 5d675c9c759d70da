"""Best reachable AUC and log loss: those of the true click probabilities.

The best reachable AUC of a set of samples is the AUC of the Bayes-optimal score: the true click
probability given all the features that a model sees, on the labels that were drawn. Its expectation
over the labels is stored as well: anything that a model gains above it is chance. The best log
loss is that of the same probabilities. Preparing raw files with a hash, a modulo or a threshold hides
some ids from the model; the best AUC stays that of the full features.

Samples are counted in bins of equal probability width, so a day of any size takes the same small
memory; two samples of one bin count as a tie, which moves the AUC by less than 1e-5.
"""

from typing import Final

import numpy as np
import numpy.typing as npt

NUM_BINS: Final = 4096

Floats = npt.NDArray[np.float64]


class Scores:
    """Counts that add up over samples.

    Attributes:
        bins: float64 `[3, NUM_BINS]`: samples, clicks, and the sum of the true probabilities in each
            bin of the true probability.
        log_loss: float64 scalar array, sum over the samples in nats.
    """

    def __init__(self, bins: Floats | None = None, log_loss: Floats | None = None) -> None:
        self.bins = np.zeros((3, NUM_BINS)) if bins is None else bins
        self.log_loss = np.zeros(()) if log_loss is None else log_loss

    def add(self, probabilities: Floats, labels: npt.NDArray[np.int8]) -> None:
        """Count samples with these true probabilities and labels, `[n]` each."""
        bins = np.minimum((probabilities * NUM_BINS).astype(np.int64), NUM_BINS - 1)
        counted = [np.bincount(bins, weights, NUM_BINS) for weights in (None, labels, probabilities)]
        self.bins += np.stack(counted)
        self.log_loss -= np.log(np.where(labels == 1, probabilities, 1 - probabilities)).sum()

    def __add__(self, other: "Scores") -> "Scores":
        return Scores(self.bins + other.bins, self.log_loss + other.log_loss)

    def summary(self) -> dict[str, float | None]:
        """The figures for a data set's provenance; `best_auc` is None if all labels are the same."""
        samples, clicks, expected_clicks = self.bins
        return {
            "best_auc": _auc(clicks, samples - clicks),
            "best_auc_expected": _auc(expected_clicks, samples - expected_clicks),
            "best_log_loss": float(self.log_loss / samples.sum()),
            "click_rate": float(clicks.sum() / samples.sum()),
        }


def _auc(positives: Floats, negatives: Floats) -> float | None:
    """AUC of samples counted by ascending score."""
    pairs = positives.sum() * negatives.sum()
    if not pairs:
        return None
    below = np.cumsum(negatives) - negatives / 2
    return float((positives * below).sum() / pairs)
