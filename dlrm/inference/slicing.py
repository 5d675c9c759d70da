"""Ways to slice samples: by the value of a feature, and by how often training has seen their ids."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor

from data.batch import Batch
from data.dataset import DatasetManifest
from data.loader import ParquetSource
from data.loader.decode import decode
from data.schema import Schema
from data.schema.encoder import read_vocabulary
from data.schema.ids import FIRST_VOCABULARY_ID, MISSING_ID, UNKNOWN_ID

VALUES: Final = 20
"""Most values of a feature that have a slice of their own."""

FREQUENCIES: Final = (1, 10, 100, 1_000, 10_000)
"""Times at which another slice begins."""

MOST: Final = 10**6
"""Larger counts of an id are not told apart, so that a sum over ranks fits into 32 bits."""

logger = logging.getLogger(__name__)


class Slicing(Protocol):
    """A way to slice samples."""

    title: str
    names: tuple[str, ...]
    """Of the slices."""

    def assign(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Positions of real samples in the batch, and the slice of each, both int64 `[m]`."""
        ...


class ByValue:
    """The most frequent values of a feature, and all others; samples with several values are in several.

    Args:
        feature: its name.
        counts: times that each id occurs in the evaluated data, `[rows]`.
        names: gives a name to each of some ids.
    """

    def __init__(self, feature: str, counts: Tensor, names: Mapping[int, str]) -> None:
        self.title = feature
        self.names: tuple[str, ...] = (*names.values(), "(all others)", "(no id)")
        self._slice_of = torch.full((len(counts),), len(names), dtype=torch.int16, device=counts.device)
        self._slice_of[list(names)] = torch.arange(len(names), dtype=torch.int16, device=counts.device)

    def assign(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Slicing.assign`."""
        ids, samples, lengths = _bags(batch, self.title)
        none = len(self.names) - 1
        without = (lengths == 0).nonzero().squeeze(1)
        pairs = torch.cat([samples * len(self.names) + self._slice_of[ids], without * len(self.names) + none])
        once = torch.unique(pairs)  # a sample counts once in a slice
        return once // len(self.names), once % len(self.names)


class ByFrequency:
    """Times that the training days hold the rarest id of a sample, over some features.

    Args:
        title: of the slices.
        counts: times that the training days hold each id, `[rows]` by feature.
    """

    def __init__(self, title: str, counts: Mapping[str, Tensor]) -> None:
        self.title = title
        ranges = [f"{begin:,} to {end - 1:,} times" for begin, end in pairwise(FREQUENCIES)]
        self.names: tuple[str, ...] = ("never", *ranges, f"{FREQUENCIES[-1]:,} times or more", "(no id)")
        self._slice_of = {
            name: torch.bucketize(each, each.new_tensor(FREQUENCIES), right=True).to(torch.uint8)
            for name, each in counts.items()
        }

    def assign(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """See `Slicing.assign`."""
        rarest = torch.full((batch.num_valid,), len(self.names) - 1, device=batch.labels.device)
        for name, slice_of in self._slice_of.items():
            ids, samples, _ = _bags(batch, name)
            rarest.scatter_reduce_(0, samples, slice_of[ids].long(), "amin")
        return torch.arange(batch.num_valid, device=rarest.device), rarest


def _bags(batch: Batch, feature: str) -> tuple[Tensor, Tensor, Tensor]:
    """Ids of a feature in the real samples of a batch, the sample of each, and the number per sample."""
    bags: JaggedTensor = batch.sparse[feature]
    lengths = bags.lengths()[: batch.num_valid].long()
    samples = torch.arange(batch.num_valid, device=lengths.device).repeat_interleave(lengths)
    return bags.values()[: len(samples)].long(), samples, lengths


def count_ids(
    uri: str, manifest: DatasetManifest, features: Sequence[str], device: torch.device
) -> dict[str, Tensor]:
    """Count how often each id occurs, up to `MOST`; ranks share the row groups. A collective.

    Reads only the columns of the features, one row group at a time, and takes 4 bytes for each table row.

    Returns:
        int32 `[rows]` by feature, on all ranks.
    """
    chosen = tuple(feature for feature in manifest.features if feature.name in features)
    narrow = replace(manifest, features=chosen, dense=())
    counts = {feature.name: np.zeros(feature.rows, np.int32) for feature in chosen}
    row_groups = [(part, number) for part in narrow.parts for number in range(len(part.row_groups))]
    source = ParquetSource(uri, narrow)
    try:
        for part, number in row_groups[dist.get_rank() :: dist.get_world_size()]:
            rows = decode(source.read(part, number), narrow, part.path)
            for feature, column in zip(chosen, rows.ids, strict=True):
                ids, times = np.unique(column.values, return_counts=True)
                own = counts[feature.name]
                own[ids] = np.minimum(own[ids] + times, MOST)
    finally:
        source.close()
    summed = {name: torch.from_numpy(each).to(device) for name, each in counts.items()}
    for each in summed.values():
        dist.all_reduce(each)
    return summed


def names_of_ids(uri: str, manifest: DatasetManifest, feature: str, ids: Sequence[int]) -> dict[int, str]:
    """Names for ids of a feature: values of its vocabulary, if the data set has one, else the ids."""
    sparse = Schema.from_json(manifest.schema).sparse if manifest.schema else ()
    listed = [each for each in sparse if each.name == feature and each.ids == "vocabulary"]
    if not listed:
        return {each: f"id {each}" for each in ids}
    values = read_vocabulary(uri, listed[0])
    special = {MISSING_ID: "(missing)", UNKNOWN_ID: "(unknown)"}
    return {each: special.get(each) or str(values[each - FIRST_VOCABULARY_ID]) for each in ids}
