"""The samples of emulated runs: a default data set, ids spread over the nodes, and how common ids are.

Synthetic ids are sorted by popularity, so that one node would hold all popular rows. Hence each table's ids
are renamed by one fixed permutation, which scatters them as hashing does. Other data sets are renamed, too.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from cpr.priority.covering import largest_tables
from data.batch import Batch
from data.dataset import Feature
from data.synthetic import SyntheticConfig
from experiments.harness.launch import ROOT
from experiments.harness.record import QUICK
from experiments.harness.samples import generated

DEFAULT: Final = SyntheticConfig(scale=0.02, days=6, rows_per_day=100_000)
"""0.5 million samples to train on and 0.1 million to test with, in tables of 0.68 million rows: about as few
samples a row as Criteo Kaggle has."""
DEFAULT_COVERING: Final = 0.984
"""Share of all rows that the 7 largest tables hold, whose rows are prioritised, as in Criteo Kaggle. The
share is lower than there, because small tables were not scaled down."""
QUICK_DATA: Final = SyntheticConfig(rows_per_day=8_192, days=2)
PERMUTATION_SEED: Final = 5
SLICES: Final = ("tail", "torso", "head")
"""Thirds of the test samples, those with the rarest ids first."""


def default_dataset(quick: bool) -> Path:
    """The data set of the emulations, a smaller one for quick runs; generated if it is absent."""
    if quick:
        return generated(QUICK_DATA, QUICK / "emulation-data")
    return generated(DEFAULT, ROOT / "datasets" / "emulation")


def skewed_dataset(dataset: Path, top_coverage: float) -> Path:
    """The variant of a default data set with another skew of ids, in a sibling folder; made if absent."""
    config = DEFAULT if dataset.name == "emulation" else QUICK_DATA
    folder = dataset.with_name(f"{dataset.name}-top-{top_coverage:g}")
    return generated(replace(config, top_coverage=top_coverage), folder)


class Ids:
    """Renames each table's ids by a permutation, and counts how often each id occurs in training."""

    def __init__(self, features: Sequence[Feature]) -> None:
        generator = torch.Generator().manual_seed(PERMUTATION_SEED)
        sizes = [feature.rows for feature in features]
        self._first = torch.tensor([0, *sizes]).cumsum(0)[:-1]
        self._renamed = torch.cat([torch.randperm(size, generator=generator) for size in sizes])
        self._counts = torch.zeros(sum(sizes), dtype=torch.int64)

    def training(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The same batches with renamed ids, which are counted."""
        for batch in batches:
            joint = self._rename(batch)
            self._counts.scatter_add_(0, joint, torch.ones_like(joint))
            yield batch

    def testing(self, batches: Iterable[Batch], tables: Sequence[int]) -> Iterator[tuple[Batch, Tensor]]:
        """The same batches with renamed ids, and how common the ids of each sample were in training.

        Yields:
            A batch, and for each of its samples the mean of log(1 + times seen in training) over the ids that
            it has in the given tables, float64 `[B]`.
        """
        for batch in batches:
            seen: Tensor = self._counts[self._rename(batch)].double().log1p()
            lengths = batch.sparse.lengths().view(-1, batch.sparse.stride())
            bags = torch.split(seen, batch.sparse.length_per_key())
            samples = torch.arange(batch.sparse.stride())
            total = torch.zeros(len(samples), dtype=torch.float64)
            for table in tables:
                total.index_add_(0, samples.repeat_interleave(lengths[table]), bags[table])
            yield batch, total / lengths[list(tables)].sum(0).clamp(min=1)

    def _rename(self, batch: Batch) -> Tensor:
        """Rename the ids of a batch in place; their old positions among all tables' rows, int64 `[N]`."""
        ids: Tensor = batch.sparse.values()
        joint: Tensor = ids + self._first.repeat_interleave(torch.tensor(batch.sparse.length_per_key()))
        ids.copy_(self._renamed[joint])
        return joint


def slice_of(familiarity: Tensor) -> Tensor:
    """The index in `SLICES` of each sample, int64 `[n]`, from how common its ids are, `[n]`."""
    ranks = torch.empty_like(familiarity, dtype=torch.int64)
    ranks[familiarity.argsort(stable=True)] = torch.arange(len(familiarity))
    return ranks * len(SLICES) // max(1, len(familiarity))


def prioritised_tables(features: Sequence[Feature], covering: float) -> list[int]:
    """The indices of the features whose tables' rows are prioritised (`cpr.priority`)."""
    chosen = largest_tables({feature.name: feature.rows for feature in features}, covering)
    return [number for number, feature in enumerate(features) if feature.name in chosen]
