"""Time of a training step by workers and batch, fitted to a few measured steps.

With `N` workers, `B` samples of all of them and `D(N, B)` bytes that a worker sends to others, a step takes

    fixed + sample * B / N + worker * (N - 1) + (byte + 1 / link) * D(N, B)

seconds. Scavenger (arXiv 2303.06659) has the first three terms; the last one is for embeddings, which it has
none of. As the speed of the links is measured, `byte` is what workers themselves need for a byte, and the
time over other links follows. No coefficient is negative but `byte`, where training uses the links better
than their measurement did.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from scipy.optimize import nnls

from cpr.estimator.renting.traffic import Traffic

LEAST_NEWS: Final = 0.05
"""Share of a term, over all trials, that other terms must not explain: else trials cannot tell it."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """A measured step."""

    workers: int
    batch: int
    """Samples of the step, over all workers."""
    seconds: float
    link_bytes_per_s: float | None = None
    """Speed of a worker's links to all others together; None: it has none."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The model of a step's time; coefficients in seconds."""

    fixed_s: float
    sample_s: float
    """Per sample of a worker."""
    worker_s: float
    """Per worker but the first: latency, and waiting for each other."""
    byte_s: float
    """Per sent byte, besides the time on the link; below 0 if that is less than measured."""
    traffic: Traffic
    link_bytes_per_s: float | None
    """Of the slowest measured step; None: none had links."""
    steps: Sequence[TimedStep]
    """That the model was fitted to."""

    def seconds(self, workers: int, batch: int, link_bytes_per_s: float | None = None) -> float:
        """Predict a step's time.

        Args:
            workers: number of workers.
            batch: samples of the step, over all workers.
            link_bytes_per_s: speed of a worker's links to all others together; None: as measured.

        Raises:
            ValueError: workers exchange something, and no measured step had links.
        """
        own_s = self.fixed_s + self.sample_s * batch / workers
        if workers == 1:
            return own_s
        link = link_bytes_per_s or self.link_bytes_per_s
        if link is None:
            raise ValueError(
                f"a step of {workers} workers cannot be predicted from runs of one worker, which exchange "
                "nothing: give a run of two or more, too"
            )
        sent = self.traffic.sent(workers, batch)
        return own_s + self.worker_s * (workers - 1) + self.sent_byte_s(link) * sent

    def sent_byte_s(self, link_bytes_per_s: float) -> float:
        """Seconds that a sent byte takes in all, over links of this speed."""
        return max(0.0, self.byte_s + 1 / link_bytes_per_s)

    @property
    def num_coefficients(self) -> int:
        """Coefficients that are not 0."""
        return sum(each != 0 for each in (self.fixed_s, self.sample_s, self.worker_s, self.byte_s))

    @property
    def worst_error(self) -> float | None:
        """Largest relative error among the steps that the model was fitted to.

        None: there are as few steps as coefficients, so that any steps are fitted exactly.
        """
        if len(self.steps) <= self.num_coefficients:
            return None
        return max(
            abs(self.seconds(each.workers, each.batch, each.link_bytes_per_s) / each.seconds - 1)
            for each in self.steps
        )

    def is_extrapolated(self, workers: int, batch: int) -> bool:
        """Whether workers, or samples of a worker, are outside of what was measured."""
        counts = [each.workers for each in self.steps]
        parts = [each.batch / each.workers for each in self.steps]
        is_inside = min(counts) <= workers <= max(counts) and min(parts) <= batch / workers <= max(parts)
        return not is_inside


def fit_step_time(steps: Sequence[TimedStep], traffic: Traffic) -> StepTime:
    """Fit the model by least squares of relative errors.

    A coefficient that these steps cannot tell from the others is 0; the order in which they are tried is that
    of `StepTime`, but `byte_s` before `worker_s`.

    Raises:
        ValueError: all steps have as many samples on a worker, or one of several workers has no links.
    """
    if len({each.batch / each.workers for each in steps}) < 2:
        raise ValueError(
            "the time of a step by its samples takes runs with different numbers of samples on a worker: "
            "give another run, with another data.global_batch_size"
        )
    if any(each.workers > 1 and each.link_bytes_per_s is None for each in steps):
        raise ValueError(
            "a run of several workers has not measured its links: train it with train.measure_scaling=true"
        )
    sent = np.array([traffic.sent(each.workers, each.batch) for each in steps])
    slowness = np.array([1 / each.link_bytes_per_s if each.link_bytes_per_s else 0.0 for each in steps])
    took = np.array([each.seconds for each in steps])
    columns = {
        "fixed_s": np.ones(len(steps)),
        "sample_s": np.array([each.batch / each.workers for each in steps]),
        "byte_s": sent,
        "worker_s": np.array([each.workers - 1.0 for each in steps]),
    }
    names, chosen = [], np.empty((len(steps), 0))
    for name, column in columns.items():
        relative = (column / took)[:, None]
        rest = relative - chosen @ np.linalg.lstsq(chosen, relative, rcond=None)[0]
        if np.linalg.norm(rest) > LEAST_NEWS * np.linalg.norm(relative):
            names.append(name)
            chosen = np.hstack([chosen, relative])
    # where times show what a byte takes over the fastest link, its measurement does not have to be exact
    known = min(slowness[sent > 0]) if "byte_s" in names else 0.0
    widths = np.linalg.norm(chosen, axis=0)  # in seconds and bytes, they differ by orders of magnitude
    found, _ = nnls(chosen / widths, 1 - sent * (slowness - known) / took)
    coefficients = dict.fromkeys(columns, 0.0) | dict(zip(names, map(float, found / widths), strict=True))
    coefficients["byte_s"] -= known
    links = [each.link_bytes_per_s for each in steps if each.link_bytes_per_s is not None]
    return StepTime(
        **coefficients, traffic=traffic, link_bytes_per_s=min(links, default=None), steps=tuple(steps)
    )
