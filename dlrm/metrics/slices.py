"""Metrics of clicks for slices of the samples, over all ranks."""

import torch
from torch import Tensor

from dlrm.metrics.click import ClickMetrics, MetricValues


class SlicedMetrics:
    """`ClickMetrics` for each of `num_slices` slices, which may overlap."""

    def __init__(self, num_slices: int, device: torch.device) -> None:
        self._slices = [ClickMetrics(device) for _ in range(num_slices)]

    def update(self, samples: Tensor, slices: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch.

        Args:
            samples: position in the batch, int64 `[m]`, of a sample for each slice that it is in.
            slices: number of that slice, `[m]`.
            logits: of the batch, `[B]`.
            labels: of the batch, 0 or 1, `[B]`.
        """
        for number in torch.unique(slices).tolist():
            chosen = samples[slices == number]
            self._slices[number].update(logits[chosen], labels[chosen])

    def compute(self) -> list[MetricValues]:
        """Compute the metrics of each slice over all ranks; a collective."""
        return [each.compute() for each in self._slices]
