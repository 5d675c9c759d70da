"""Means of per-sample values, such as recall@10, over all ranks."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SampleMean:
    """Mean of a per-sample value."""

    value: float | None
    """None if no sample has a value, or if it is infinite."""
    num_samples: int
    """Samples of all ranks that have a value."""


class SampleMeans:
    """Collects values of named metrics of one evaluation on this rank, and averages them over all ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._num_samples = 0

    def update(self, values: Mapping[str, Tensor], num_samples: int) -> None:
        """Add a batch: for each name the values `[num_samples]`; a sample whose value is NaN has none.

        Raises:
            ValueError: values are not of that shape.
        """
        self._num_samples += num_samples
        for name, each in values.items():
            if each.shape != (num_samples,):
                raise ValueError(
                    f"metric {name} has values of shape {[*each.shape]} for {num_samples} samples; give one "
                    "for each"
                )
            found = each.detach().double()
            # neither the number of values nor a mask is read on the host, which would wait for a GPU
            added = torch.stack([found.nansum(), found.isnan().logical_not().sum().double()])
            self._sums[name] = self._sums[name] + added if name in self._sums else added

    def compute(self) -> tuple[dict[str, SampleMean], int]:
        """Means by name over the samples of all ranks, and the number of all these samples.

        A collective if there is a process group, with equal results on all ranks. Warns of infinite means.
        """
        mine = {name: tuple(added.tolist()) for name, added in self._sums.items()}, self._num_samples
        of_ranks: list[Any] = [mine]
        if dist.is_initialized():
            of_ranks = [None] * dist.get_world_size()
            dist.all_gather_object(of_ranks, mine)
        names = dict.fromkeys(name for sums, _ in of_ranks for name in sums)
        means = {name: _mean([sums[name] for sums, _ in of_ranks if name in sums]) for name in names}
        if infinite := [name for name, mean in means.items() if mean.num_samples and mean.value is None]:
            logger.warning(
                "metrics of the model are infinite for some samples, and reported as undefined: %s. Give NaN "
                "for a sample without a value",
                ", ".join(infinite),
            )
        return means, sum(count for _, count in of_ranks)


def _mean(sums: list[tuple[float, ...]]) -> SampleMean:
    total, count = (sum(column) for column in zip(*sums, strict=True))
    return SampleMean(value=total / count if count and isfinite(total) else None, num_samples=int(count))
