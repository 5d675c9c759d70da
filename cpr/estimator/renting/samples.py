"""Samples that training needs to a target, by batch.

A larger batch needs fewer steps and more samples: `E_min + S_min * B` samples, with `E_min` the fewest
samples, of very small batches, and `S_min` the fewest steps, of very large ones; `E_min / S_min` is the
critical batch (McCandlish et al., arXiv 1812.06162, section 2.3). For one pass over a log it takes the place
of Scavenger's epochs to a target. The critical batch is estimated by the gradient noise scale, or the law is
fitted to runs of different batches that have reached the target.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

LOWER_IS_BETTER: Final[Mapping[str, bool]] = {"auc": False, "log_loss": True, "normalized_entropy": True}
"""Metrics of a target, as in the lines `evaluation` of `metrics.jsonl`."""

NEGLIGIBLE: Final = 1e-9
"""Share of all samples that is rounding."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Value of a metric on the test days that training is to reach."""

    metric: str
    value: float

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Parse `METRIC=VALUE`, such as `auc=0.79`.

        Raises:
            ValueError: there is no such metric, or the value is no number.
        """
        metric, _, value = text.partition("=")
        if metric not in LOWER_IS_BETTER:
            raise ValueError(
                f"the target {text!r} has no known metric: write METRIC=VALUE, with one of "
                f"{', '.join(LOWER_IS_BETTER)}, such as auc=0.79"
            )
        try:
            return cls(metric=metric, value=float(value))
        except ValueError:
            raise ValueError(f"the target {text!r} has no number: write it like {metric}=0.79") from None

    def __str__(self) -> str:
        return f"{self.metric}={self.value:g}"

    def reached_after(self, curve: Sequence[tuple[float, float]]) -> float | None:
        """Samples after which a learning curve reaches the target; None: it does not.

        Args:
            curve: samples trained and the metric's value, in order; it is made `monotone`, and linear between
                two evaluations.
        """
        sign = -1.0 if LOWER_IS_BETTER[self.metric] else 1.0
        before: tuple[float, float] | None = None
        for samples, value in monotone(curve, LOWER_IS_BETTER[self.metric]):
            missing = sign * (self.value - value)
            if missing <= 0:
                if before is None:
                    return samples
                was_missing = sign * (self.value - before[1])
                return before[0] + (samples - before[0]) * was_missing / (was_missing - missing)
            before = samples, value
        return None

    def best_of(self, curve: Sequence[tuple[float, float]]) -> float:
        """The best value of a learning curve."""
        values = [value for _, value in curve]
        return min(values) if LOWER_IS_BETTER[self.metric] else max(values)


def monotone(curve: Sequence[tuple[float, float]], falls: bool) -> list[tuple[float, float]]:
    """A learning curve up to its best value, without the ups and downs of single evaluations.

    The monotone values with the least squared differences (isotonic regression, pool-adjacent-violators): one
    lucky evaluation does not reach a target early.

    Args:
        curve: samples and value of each evaluation, in order.
        falls: whether the metric is to fall.
    """
    sign = -1.0 if falls else 1.0
    values = [sign * value for _, value in curve]
    num_kept = values.index(max(values)) + 1 if values else 0
    blocks: list[tuple[float, int]] = []
    """Mean and length of runs of equal values."""
    for value in values[:num_kept]:
        blocks.append((value, 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            (before, num_before), (after, num_after) = blocks[-2:]
            length = num_before + num_after
            blocks[-2:] = [((before * num_before + after * num_after) / length, length)]
    smooth = [sign * mean for mean, length in blocks for _ in range(length)]
    return [(samples, value) for (samples, _), value in zip(curve[:num_kept], smooth, strict=True)]


@dataclass(frozen=True, kw_only=True)
class SamplesNeeded:
    """Samples to the target: `least_samples + least_steps * batch`."""

    least_samples: float
    least_steps: float
    source: str
    """What it was estimated from."""

    def at(self, batch: int) -> float:
        """Samples with that batch."""
        return self.least_samples + self.least_steps * batch

    @property
    def critical_batch(self) -> float | None:
        """Batch with twice the fewest samples and twice the fewest steps; None: no batch is too large."""
        return self.least_samples / self.least_steps if self.least_steps else None

    @classmethod
    def by_noise(cls, batch: int, samples: float, noise_scale: float | None, source: str) -> "SamplesNeeded":
        """From the samples with one batch and the gradient noise scale; None: all batches need as many.

        Noise is taken as the same during all of training.
        """
        if noise_scale is None:
            return cls(least_samples=samples, least_steps=0.0, source=source)
        least_steps = samples / (noise_scale + batch)
        return cls(least_samples=noise_scale * least_steps, least_steps=least_steps, source=source)

    @classmethod
    def by_runs(cls, reached: Mapping[int, float], source: str) -> "SamplesNeeded":
        """Fitted to the samples of several batches, by relative errors.

        Args:
            reached: samples to the target by batch, of two batches at least.
            source: what these are.
        """
        samples = np.array(list(reached.values()))
        columns = np.stack([np.ones(len(reached)), np.array(list(reached), float)], axis=1)
        widths = np.linalg.norm(columns / samples[:, None], axis=0)
        found, _ = nnls(columns / samples[:, None] / widths, np.ones(len(reached)))
        least_samples, least_steps = map(float, found / widths)
        if least_steps * max(reached) < NEGLIGIBLE * least_samples:
            least_steps = 0.0  # but for rounding
        return cls(least_samples=least_samples, least_steps=least_steps, source=source)
