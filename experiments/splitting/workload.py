"""Models, tables and batches of `experiments.splitting`, shared by its launcher and its workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import nn

from data.batch import Batch
from data.criteo import CATEGORY_NAMES, DENSE_NAMES, TERABYTE_CAP, TERABYTE_CARDINALITIES, capped
from data.dataset import Feature
from data.loader import LoaderConfig
from data.synthetic.config import BAG_SIZES
from data.synthetic.popularity import Popularity
from dlrm.config.recipe import load_config
from dlrm.config.schema import Config
from dlrm.launch.device import Ranks
from dlrm.models.build import build_model
from dlrm.training.data import Inputs
from experiments.harness.turns import Effort
from experiments.harness.workload import Ids, inputs_of, part_of_batch

RECIPE: Final = "terabyte"
"""Of `dlrm/recipes`: 64 columns, SGD everywhere, global batch 2048."""
MODELS: Final[dict[str, tuple[str, ...]]] = {
    "lr": (),
    "fm": (),
    "deepfm": ("model.top_mlp=[400, 400, 400, 1]",),
    "dlrm": (),
    "dcn": ("model.cross_layers=3", "model.cross_rank=64", "model.top_mlp=[512, 256, 1]"),
}
"""Overrides of the recipe by model, as named in the figures."""
KINDS: Final = {"dcn": "dcnv2"}
"""`model.kind` of the models that figures name differently."""
BAGS: Final[dict[str, tuple[int, ...]]] = {"multi_hot": BAG_SIZES, "one_hot": (1,) * len(BAG_SIZES)}
"""Ids per sample of each feature: as in MLPerf's multi-hot Criteo Terabyte, and as in Criteo itself."""
ROWS: Final = capped(TERABYTE_CARDINALITIES, TERABYTE_CAP)
"""Rows of the tables for the count of unique rows."""


@dataclass(frozen=True, kw_only=True)
class TerabyteWorkload:
    """Size of the tables in memory and of the batches, and duration of the timing."""

    max_rows: int = 50_000
    """Limit of a table's rows in memory."""
    global_batch_size: int = 2048
    """Samples in a step, over all ranks."""
    num_batches: int = 4
    """Different batches, used in turn."""
    cell_s: float = 36.0
    """Time limit of a cell with its minimum of rounds."""
    rounds: tuple[int, int] = (12, 120)
    """Minimum and maximum number of rounds of a cell."""
    reach: float = 0.025
    """Relative reach of the intervals at which a cell ends early."""
    steps: int = 2
    """Timed steps of a turn, after an untimed one."""
    seed: int = 1
    """Seed of the batches."""

    @property
    def effort(self) -> Effort:
        """Limits of rounds and time of a cell."""
        least, most = self.rounds
        return Effort(
            full_rounds=0, least_rounds=least, most_rounds=most, seconds=self.cell_s, reach=self.reach
        )

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features of the data set, each with a table of its own."""
        rows = capped(TERABYTE_CARDINALITIES, self.max_rows)
        return tuple(Feature(name=name, rows=each) for name, each in zip(CATEGORY_NAMES, rows, strict=True))

    def config(self, model: str, strategy: str, *overrides: str) -> Config:
        """Configuration of a training run; `overrides` of the recipe add to those of the model."""
        return load_config(
            RECIPE,
            [
                *MODELS[model],
                f"model.kind={KINDS.get(model, model)}",
                "train.device=cpu",
                "train.precision=fp32",
                f"data.global_batch_size={self.global_batch_size}",
                f"sharding.strategy={strategy}",
                *overrides,
            ],
        )

    def unsharded(self, model: str) -> nn.Module:
        """The model before sharding; its tables take no memory."""
        return build_model(self.config(model, "torchrec").model, self.features, DENSE_NAMES, torch.float32)

    def inputs(self, config: Config, ranks: Ranks) -> Inputs:
        """Inputs to build the trainer's model from, without a data loader."""
        loader = _NoLoader(LoaderConfig(batch_size=self.global_batch_size // ranks.world_size))
        return inputs_of(config, RECIPE, ranks, self.features, loader)

    def batches(self, ranks: Ranks) -> list[Batch]:
        """This rank's part of each global batch, with one id per feature, skewed like Criteo's."""
        size = self.global_batch_size // ranks.world_size
        mine = slice(ranks.rank * size, (ranks.rank + 1) * size)
        rows = [feature.rows for feature in self.features]
        return [
            part_of_batch(
                np.stack([each[:, 0] for each in self._draw(number, rows, BAGS["one_hot"])]),
                np.random.default_rng([self.seed, number, 1]),
                mine,
            )
            for number in range(self.num_batches)
        ]

    def keys(self, number: int, bags: str, ranks: Ranks) -> list[Ids]:
        """Unique ids of each feature among this rank's samples of a batch, with tables of full size."""
        size = self.global_batch_size // ranks.world_size
        mine = slice(ranks.rank * size, (ranks.rank + 1) * size)
        return [np.unique(each[mine]) for each in self._draw(number, ROWS, BAGS[bags])]

    def _draw(self, number: int, rows: Sequence[int], bags: Sequence[int]) -> list[Ids]:
        """Draw ids `[B, bag]` of each feature."""
        rng = np.random.default_rng([self.seed, number])
        return [
            Popularity(each).ids(rng.random((self.global_batch_size, bag)))
            for each, bag in zip(rows, bags, strict=True)
        ]


@dataclass(frozen=True)
class _NoLoader:
    """The part of a loader that building a model reads."""

    config: LoaderConfig
