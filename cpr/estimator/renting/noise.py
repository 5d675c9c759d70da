"""Gradient noise, from squared norms of the workers' own gradients and of their mean.

A worker's mean gradient over `b` samples has the expected squared norm `|G|^2 + tr(S) / b`, with `G` the true
gradient and `S` the covariance of a sample's gradient. Two sizes of `b`, a worker's part of the batch and the
whole batch, give both unknowns without bias (McCandlish et al., "An Empirical Model of Large-Batch Training",
arXiv 1812.06162, appendix A.1).
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class GradientNoise:
    """Mean squared norms of gradients over a window of steps, and what follows from them.

    Raises:
        ValueError: there is one worker, whose gradient is the mean itself.
    """

    workers: int
    batch: int
    """Samples of a step, over all workers."""
    steps: int
    """Steps of the window."""
    local: float
    """Squared norm of a worker's own mean gradient: mean over workers, weighted by their samples."""
    averaged: float
    """Squared norm of the mean gradient of all workers."""

    def __post_init__(self) -> None:
        if self.workers < 2:
            raise ValueError("gradient noise shows in how workers differ: train with at least two")

    @property
    def trace(self) -> float:
        """Unbiased estimate of `tr(S)`, the variance of a sample's gradient; not above 0 by chance alone.

        Holds for parts of any sizes: with samples as weights, the mean of `1 / b` is `workers / batch`.
        """
        return self.batch * (self.local - self.averaged) / (self.workers - 1)

    @property
    def squared_norm(self) -> float:
        """Unbiased estimate of `|G|^2`; below 0 where noise exceeds what the window can resolve."""
        return (self.workers * self.averaged - self.local) / (self.workers - 1)

    @property
    def scale(self) -> float | None:
        """Simple noise scale `tr(S) / |G|^2`, in samples: the batch at which noise and gradient are equal.

        None: the window is too short for it.
        """
        return self.trace / self.squared_norm if min(self.trace, self.squared_norm) > 0 else None

    @property
    def gamma(self) -> float | None:
        """Scavenger's noise (arXiv 2303.06659): energy of local over averaged gradients, by worker.

        A function of `scale`, batch and workers: 1 / workers without noise, towards 1 with noise alone. None:
        the mean gradient is 0.
        """
        return self.local / self.averaged / self.workers if self.averaged > 0 else None
