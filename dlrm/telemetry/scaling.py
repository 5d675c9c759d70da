"""Measures what `cpr plan --workers` needs to know of a run (`train.measure_scaling`).

The norm of a rank's own dense gradients travels to the others among the scalars that are reduced with the
gradients, so that nothing more is sent; the norm of the mean gradient is known on all ranks after that.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor, nn

from cpr.estimator.renting.noise import GradientNoise
from cpr.estimator.renting.traffic import pooled_share
from dlrm.comm.links import Link
from dlrm.optim.norms import local_norms
from dlrm.sharding.splitting.wire import Wire, counted

WINDOW: Final = 1000
"""Steps over which squared norms are averaged at most: the newest ones, of the second half of the run. In the
first steps of training, gradients are large, and noise is not."""
NUM_SCALARS: Final = 2
"""Scalars that several ranks reduce with the gradients: `ScalingMeter.scalars`."""
COUNTED_STEP: Final = 3
"""Step whose sent bytes are counted: the first ones begin what schedules do ahead."""


@dataclass(frozen=True, kw_only=True)
class ScalingFigures:
    """What was measured so far; None: one worker, or not yet."""

    workers: int
    global_batch: int
    """Samples of a step, over all ranks."""
    dense_bytes: int
    """Of the gradients of all dense parameters."""
    pooled_bytes: float | None = None
    """Of a sample's embeddings and their gradients; see `cpr.estimator.renting.step_time.Traffic`."""
    link: Link | None = None
    """As each rank sees it while all send equally much to all others."""
    noise: GradientNoise | None = None
    """Of the dense parameters, over the newest half of the steps, at most `WINDOW`."""


class ScalingMeter:
    """Measures gradient noise, and bytes that are sent; all ranks use it alike.

    A run that is resumed starts over.

    Args:
        parameters: dense fp32 parameters, equal on all ranks.
        workers: number of ranks.
        global_batch: samples of a step, over all ranks.
        link: measured speed; None with one rank.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], workers: int, global_batch: int, link: Link | None
    ) -> None:
        self._parameters = list(parameters)
        self._workers, self._global_batch, self._link = workers, global_batch, link
        self._device = self._parameters[0].device
        self._norms = torch.zeros(WINDOW, 2, device=self._device)
        """Mean squared norms of ranks' own gradients, and squared norms of mean gradients, by step."""
        self._steps = 0
        self._wire: Wire | None = None
        self._sent_bytes = torch.zeros((), device=self._device)
        """Mean over ranks; 0 before `COUNTED_STEP`."""

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A block for the forward and backward pass of each step; counts what one of them sends."""
        if self._workers == 1 or self._steps + 1 != COUNTED_STEP:
            yield
            return
        with counted() as wire:
            yield
        self._wire = wire

    def scalars(self, weight: float) -> Tensor:
        """What this rank adds to the means over ranks after its backward pass, fp32 `[NUM_SCALARS]`.

        With one rank nothing, `[0]`.

        Args:
            weight: of this rank's batch, see `data.batch.Batch`; its gradients are multiplied by it.
        """
        if self._workers == 1:
            return torch.zeros(0, device=self._device)
        # with samples as weights, the mean over ranks of |weight * g|^2 / weight is that of |g|^2
        own = self._squared_norm() / weight
        sent = 0.0 if self._wire is None else self._wire.value_bytes
        return torch.stack([own, own.new_full((), sent)])

    def observe(self, means: Tensor) -> Tensor:
        """Take the means over ranks, at whose end are those of `scalars`, and the mean gradients.

        Returns the other means; waits for no GPU.
        """
        if self._workers == 1:
            return means
        others, (local, sent) = means[:-NUM_SCALARS], means[-NUM_SCALARS:].unbind()
        self._norms[self._steps % WINDOW] = torch.stack([local, self._squared_norm()])
        if self._wire is not None:
            self._sent_bytes.copy_(sent)
            self._wire = None
        self._steps += 1
        return others

    def figures(self) -> ScalingFigures:
        """What was measured so far; waits for the GPU."""
        known = min((self._steps + 1) // 2, WINDOW)
        figures = ScalingFigures(
            workers=self._workers,
            global_batch=self._global_batch,
            dense_bytes=4 * sum(each.numel() for each in self._parameters),
            link=self._link,
        )
        if self._workers == 1 or not known:
            return figures
        newest = torch.arange(self._steps - known, self._steps, device=self._device) % WINDOW
        local, averaged = self._norms[newest].double().mean(0).tolist()
        sent = self._sent_bytes.item() if self._steps >= COUNTED_STEP else None
        share = pooled_share(self._workers)
        return replace(
            figures,
            pooled_bytes=None if sent is None else sent / share / self._global_batch,
            noise=GradientNoise(
                workers=self._workers, batch=self._global_batch, steps=known, local=local, averaged=averaged
            ),
        )

    def _squared_norm(self) -> Tensor:
        """Of the gradients of all parameters together, a scalar."""
        gradients = [each.grad for each in self._parameters if each.grad is not None]
        return local_norms(gradients).square().sum().to(self._device)
