"""Gradient noise of linear regression, estimated by the trainer's `ScalingMeter` and known in closed form.

Columns are independent and normal with variances `v`, labels are `x * w + noise`, and the loss of a sample is
half its squared error. With the error `d` of the weights, the gradient is `v d`, and the trace of a sample's
covariance is `sum(v) (sum(v d^2) + noise^2) + |v d|^2`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn

from dlrm.telemetry.scaling import WINDOW, ScalingMeter
from experiments.harness.record import Row

COLUMNS: Final = 64
RATE: Final = 2e-4
"""Learning rate: within a window, the gradient shrinks by a tenth or so, as it does in training."""


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    """Workers with parts of a batch, and the noise of the labels."""

    sizes: tuple[int, ...]
    """Samples of each worker."""
    noise: float
    """Standard deviation of the labels' noise."""

    @property
    def name(self) -> str:
        """Short unique name."""
        return f"{'+'.join(map(str, self.sizes))}, labels {self.noise:g}"


CASES: Final[Sequence[LinearCase]] = (
    LinearCase(sizes=(128, 128), noise=0.5),
    LinearCase(sizes=(16, 16, 16, 16), noise=0.5),
    LinearCase(sizes=(64, 192), noise=1.0),
)
"""Noise scales of about a third of the batch, a little more than the batch, and two thirds of it."""


def measure(case: LinearCase, seed: int, steps: int = 2 * WINDOW) -> Row:
    """Train by plain SGD; return the noise scale that was estimated, and the exact one of the same steps."""
    random = torch.Generator().manual_seed(seed)
    variances = torch.logspace(0, -1, COLUMNS)
    truth = torch.randn(COLUMNS, generator=random) / COLUMNS**0.5
    weights = nn.Parameter(torch.zeros(COLUMNS))
    workers, batch = len(case.sizes), sum(case.sizes)
    meter = ScalingMeter([weights], workers, batch, None)
    traces, squared_norms = [], []
    for _ in range(steps):
        trace, squared_norm = closed_form(variances, weights.detach() - truth, case.noise)
        traces.append(trace)
        squared_norms.append(squared_norm)
        mean, shared = torch.zeros(COLUMNS), torch.zeros(2)
        for size in case.sizes:
            weight = size * workers / batch
            x = torch.randn(size, COLUMNS, generator=random) * variances.sqrt()
            errors = x @ (weights.detach() - truth) - case.noise * torch.randn(size, generator=random)
            weights.grad = weight * (x.T @ errors) / size
            mean += weights.grad / workers
            shared += meter.scalars(weight) / workers
        weights.grad = mean
        meter.observe(shared)
        weights.data.sub_(RATE * mean)
    found = meter.figures().noise
    assert found is not None, "there are several workers"
    return {
        "kind": "linear",
        "case": case.name,
        "seed": seed,
        "batch": batch,
        "found": found.scale,
        "exact": sum(traces[-found.steps :]) / sum(squared_norms[-found.steps :]),
    }


def closed_form(variances: Tensor, error: Tensor, noise: float) -> tuple[float, float]:
    """Trace of the covariance of a sample's gradient, and the squared norm of the true gradient.

    Args:
        variances: of the columns, fp32 `[D]`.
        error: weights minus the true ones, fp32 `[D]`.
        noise: standard deviation of the labels' noise.
    """
    squared_norm = float((variances * error).square().sum())
    loss = float((variances * error.square()).sum()) + noise**2
    return float(variances.sum()) * loss + squared_norm, squared_norm
