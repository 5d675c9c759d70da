"""The dense parts of models that `experiments.communication` trains, shared by its launcher and its workers.

A dense part is the bottom MLP, the interaction or cross layers, and the top MLP. Random vectors replace the
output of the tables, so that only dense gradients are exchanged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor, nn

from data.criteo import CATEGORY_NAMES, DENSE_NAMES, NUM_DENSE
from data.dataset import Feature
from dlrm.config.recipe import load_config
from dlrm.config.schema import Config
from dlrm.launch.device import Ranks
from dlrm.models.build import build_model
from dlrm.models.dcn import DCNv2, LowRankCross
from dlrm.models.dlrm import DLRM

SEED: Final = 1
NUM_BATCHES: Final = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Shape of a dense part, and size of its batches and turns."""

    recipe: str
    """Of `dlrm/recipes`."""
    overrides: Sequence[str] = ()
    """Overrides of the recipe."""
    steps: int
    """Steps of a turn, which should take at least 10 ms."""
    is_large: bool = False
    """Whether a gradient is so large that few contenders fit in memory."""
    links_gbit_per_s: Mapping[tuple[int, int], Sequence[float]] | None = None
    """Measured link speeds by number of workers, in all and per node, where memory and time do not allow all
    of them."""

    @property
    def config(self) -> Config:
        """Configuration of the whole model."""
        return load_config(self.recipe, [*self.overrides, "train.device=cpu", "train.precision=fp32"])


MODELS: Final[Mapping[str, Shape]] = {
    "tiny": Shape(recipe="tiny", steps=5),
    "terabyte": Shape(recipe="terabyte", steps=2),
    "kaggle": Shape(recipe="kaggle", steps=5, links_gbit_per_s={(2, 1): (25.0, 1.0)}),
    "mlperf": Shape(
        recipe="mlperf-dcnv2",
        overrides=("data.global_batch_size=128",),
        steps=1,
        is_large=True,
        links_gbit_per_s={(2, 1): (25.0, 1.0)},
    ),
    "wide": Shape(
        recipe="terabyte",
        overrides=("model.top_mlp=[4096, 4096, 4096, 4096, 1]", "data.global_batch_size=128"),
        steps=1,
        is_large=True,
        links_gbit_per_s={(2, 1): (25.0, 5.0, 1.0), (4, 2): (1.0,)},
    ),
    "quick": Shape(recipe="tiny", overrides=("data.global_batch_size=64",), steps=5),
}
"""Shapes by their names in rows and figures; `quick` is for quick runs alone."""


class DensePart(nn.Module):
    """A DLRM or a DCN-v2 without its tables.

    Args:
        shape: of the model; its initial weights are always the same.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        features = [Feature(name=name, rows=1) for name in CATEGORY_NAMES]
        torch.manual_seed(SEED)
        model = cast("DLRM | DCNv2", build_model(shape.config.model, features, DENSE_NAMES, torch.float32))
        assert model.bottom is not None, "there are dense columns"
        self.bottom = model.bottom
        self.between: nn.Module
        self.between, self.top = (
            (model.sparse.cross, model.sparse.top)
            if isinstance(model, DCNv2)
            else (model.sparse.interaction, model.top)
        )

    def forward(self, dense: Tensor, pooled: Tensor) -> Tensor:
        """fp32 logits `[B]` from dense `[B, num_dense]` and the tables' output `[B, F * dim]`."""
        vector = self.bottom(dense)
        between = (
            self.between(torch.cat([vector, pooled], dim=1))
            if isinstance(self.between, LowRankCross)
            else self.between(vector, pooled, CATEGORY_NAMES)
        )
        logits: Tensor = self.top(between)
        return logits


@dataclass(frozen=True)
class Samples:
    """One rank's part of a batch."""

    dense: Tensor
    pooled: Tensor
    labels: Tensor


def samples(shape: Shape, ranks: Ranks) -> list[Samples]:
    """A few batches, different ones on each rank."""
    config = shape.config
    size = config.data.global_batch_size // ranks.world_size
    width = len(CATEGORY_NAMES) * config.model.embedding_dim
    random = torch.Generator().manual_seed(SEED + ranks.rank)
    return [
        Samples(
            dense=torch.rand(size, NUM_DENSE, generator=random),
            pooled=torch.randn(size, width, generator=random),
            labels=torch.randint(2, (size,), generator=random).float(),
        )
        for _ in range(NUM_BATCHES)
    ]


def num_dense(model: nn.Module) -> int:
    """Number of dense parameters of a model."""
    return sum(parameter.numel() for parameter in model.parameters())
