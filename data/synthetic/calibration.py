"""Calibrates the teacher's scores to click probabilities of known, Criteo-like difficulty.

The logit is `intercept + main_slope * main + pairs_slope * pairs`. The three are solved for on a
calibration sample, so that click rate, best reachable AUC and the share of the interactions are the
wanted ones whatever the seed and the tables.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from data.synthetic.profile import BEST_AUC, CLICK_RATE

INTERACTION_SHARE: Final = 0.2
"""Share of the interactions in the variance of the logit."""

MAX_SLOPE: Final = 20.0
"""Slopes searched: the logit of a standardised score is never as steep as this."""

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Calibration:
    """From scores to click probabilities."""

    intercept: float
    main_slope: float
    pairs_slope: float

    @classmethod
    def fit(cls, main: Floats, pairs: Floats) -> "Calibration":
        """Solve for the wanted click rate, best AUC and share of the interactions.

        Args:
            main: main part of the score of a sample of samples, float64 `[n]`.
            pairs: pairs part.
        """
        main_unit = np.sqrt(1 - INTERACTION_SHARE) / main.std()
        pairs_unit = np.sqrt(INTERACTION_SHARE) / pairs.std()
        standard = np.sort(main * main_unit + pairs * pairs_unit)
        low, high = 0.0, MAX_SLOPE
        for _ in range(30):
            slope = (low + high) / 2
            intercept = _intercept_at_rate(slope * standard)
            auc = expected_auc(_sigmoid(slope * standard + intercept))
            low, high = (slope, high) if auc < BEST_AUC else (low, slope)
        return cls(float(intercept), float(slope * main_unit), float(slope * pairs_unit))

    def probabilities(self, score: tuple[Floats, Floats]) -> Floats:
        """Click probability of each sample, float64 `[n]`."""
        main, pairs = score
        return _sigmoid(self.intercept + self.main_slope * main + self.pairs_slope * pairs)


def _sigmoid(logit: Floats) -> Floats:
    return np.asarray(1 / (1 + np.exp(-logit)))


def _intercept_at_rate(logit: Floats) -> float:
    """What to add to the logits for a mean probability of `CLICK_RATE`."""
    low, high = -100.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        if _sigmoid(logit + middle).mean() < CLICK_RATE:
            low = middle
        else:
            high = middle
    return low


def expected_auc(ascending: Floats) -> float:
    """AUC to expect when labels are drawn from these probabilities and they are also the score."""
    below = np.cumsum(1 - ascending)
    pairs_won = (ascending[1:] * below[:-1]).sum()
    pairs_of_one = (ascending * (1 - ascending)).sum()
    return float(pairs_won / (ascending.sum() * below[-1] - pairs_of_one))
