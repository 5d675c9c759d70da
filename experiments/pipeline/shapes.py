"""Models and batches of `experiments.pipeline`, shared by its launcher and its workers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from dlrm.config.recipe import load_config
from dlrm.config.schema import Config
from experiments.pipeline.schedules import SCHEDULES
from experiments.splitting.workload import TerabyteWorkload


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A recipe with tables of at most `max_rows` rows, whose plan does not depend on timing."""

    recipe: str
    """Of `dlrm/recipes`."""
    strategy: str = "torchrec"
    """`sharding.strategy`."""
    max_rows: int = 3000
    """Limit of the rows of a table; tables that are smaller in Criteo Terabyte keep their size."""
    global_batch_size: int = 1024
    """Samples in a step, over all workers."""
    num_batches: int = 8
    """Different batches, used in turn."""
    steps: int = 12
    """Timed steps of a turn."""
    precision: str = "bf16"
    """`train.precision`."""
    without: tuple[str, ...] = ()
    """Schedules that the plan does not allow."""

    @property
    def workload(self) -> TerabyteWorkload:
        """Features and batches."""
        return TerabyteWorkload(
            max_rows=self.max_rows,
            global_batch_size=self.global_batch_size,
            num_batches=self.num_batches,
        )

    @property
    def schedules(self) -> list[str]:
        """The schedules under which it is trained."""
        return [name for name in SCHEDULES if name not in self.without]

    def config(self, overrides: Sequence[str]) -> Config:
        """Configuration of a training run of the recipe."""
        settings = (
            "train.device=cpu",
            f"train.precision={self.precision}",
            f"data.global_batch_size={self.global_batch_size}",
            f"sharding.strategy={self.strategy}",
        )
        return load_config(self.recipe, [*settings, *overrides])


SHAPES: Final = {
    "terabyte": Shape(recipe="terabyte", max_rows=100_000, global_batch_size=2048, steps=4),
    "tiny": Shape(recipe="tiny"),
    "dcnv2": Shape(recipe="dcnv2"),
    "deepfm": Shape(recipe="deepfm", strategy="des", without=("waves", "tick_tock")),
}
