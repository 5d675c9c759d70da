"""Calibration in bins: predicted probabilities and the share of clicks among samples of similar predictions.

Samples are counted in fine bins of equal width in the logit, so that the memory is bounded and ranks can be
added up. Neighbouring ones are joined at the end to bins of about as many samples each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

NUM_BINS: Final = 20
FINE: Final = 100
"""Fine bins per unit of the logit."""
LARGEST: Final = 20
"""Logits beyond this count in the outermost fine bins."""


@dataclass(frozen=True, kw_only=True)
class CalibrationBin:
    """Samples whose predictions are similar."""

    num_samples: int
    predicted: float
    """Mean predicted probability."""
    observed: float
    """Share of clicks."""


class Reliability:
    """Collects predictions of this rank, on the device of the logits."""

    def __init__(self, device: torch.device) -> None:
        # float64 exists on CPUs and CUDA, and counts samples exactly up to 2**53
        self._sums = torch.zeros(3, 2 * LARGEST * FINE, dtype=torch.float64, device=device)

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: fp32 `logits` and `labels`, 0 or 1, both `[B]`."""
        wide = logits.detach().double()
        # `ClickMetrics` reports NaN, later
        bins = ((wide.nan_to_num().clamp(-LARGEST, LARGEST) + LARGEST) * FINE).long()
        bins.clamp_(max=self._sums.shape[1] - 1)
        added = torch.stack([torch.ones_like(wide), wide.sigmoid(), labels.double()])
        self._sums.index_add_(1, bins, added)

    def compute(self) -> list[CalibrationBin]:
        """Bins of all ranks' samples by ascending prediction; a collective."""
        sums = self._sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        return _joined(sums.cpu().numpy())


def calibration_error(bins: Sequence[CalibrationBin]) -> float | None:
    """Mean distance of predicted and observed over samples: the expected calibration error (Naeini, 2015)."""
    total = sum(each.num_samples for each in bins)
    return (
        sum(each.num_samples * abs(each.predicted - each.observed) for each in bins) / total
        if total
        else None
    )


def _joined(sums: NDArray[np.float64]) -> list[CalibrationBin]:
    """Join fine bins `[3, n]` to at most `NUM_BINS` with about as many samples each."""
    ends = np.cumsum(sums[0])
    if not ends[-1]:
        return []
    # a fine bin belongs to the bin in which the middle of its samples lies
    bins = ((ends - sums[0] / 2) * NUM_BINS / ends[-1]).astype(np.int64).clip(0, NUM_BINS - 1)
    joined = np.stack([np.bincount(bins, weights=row, minlength=NUM_BINS) for row in sums])
    return [
        CalibrationBin(
            num_samples=int(count), predicted=float(predicted / count), observed=float(clicks / count)
        )
        for count, predicted, clicks in joined.T
        if count
    ]
