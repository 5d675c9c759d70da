"""What splitting saves in bytes in shapes of recipes, by formula: `python -m experiments.splitting_bytes`.

For every model and several numbers of ranks: the share of bytes saved against a parameter server's pull and
push of unique rows, and against TorchRec's all-to-all of pooled embeddings. The formulas are those of
`dlrm.sharding.splitting.planning.savings`; `tests/system/sharding/test_wire.py` holds what they are made of
against counted bytes. A parameter server's keys are counted and the ids that we send are not, as in the
paper; what comes out with them is among the figures of `experiments.splitting`. How many rows of a batch are
different follows from the popularity of ids in the synthetic data, which is fitted to Criteo. Nothing is
measured, nothing stored.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch

from data.criteo import NUM_DENSE, TERABYTE_CARDINALITIES, capped
from data.dataset import Feature
from data.synthetic.config import BAG_SIZES
from data.synthetic.popularity import Popularity
from dlrm.config.recipe import load_config
from dlrm.config.schema import MODELS, Config, ModelKind
from dlrm.models.build import build_model
from dlrm.sharding.splitting.planning.savings import Traffic, traffic_of

RECIPES: Final = ("terabyte", "mlperf-dcnv2")
RANKS: Final = (2, 4, 8)
MULTI_HOT: Final = frozenset({"mlperf-dcnv2"})
ROWS: Final = capped(TERABYTE_CARDINALITIES, 10_000_000)


@dataclass(frozen=True)
class Saved:
    """A line of the table."""

    recipe: str
    model: str
    num_ranks: int
    batch_size: int
    """Samples of a rank."""
    unique_rows: float
    """Different rows among them, in all tables."""
    traffic: Traffic


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0]).parse_args(arguments)
    columns = " ".join(f"{name:>11}" for name in ("split", "all-to-all", "pull, push"))
    print(f"{'recipe':<13} {'model':<7} {'ranks':>5} {columns}   saved")
    for recipe in RECIPES:
        for num_ranks in RANKS:
            for line in saved(recipe, num_ranks):
                print(_told(line))
    return 0


def saved(recipe: str, num_ranks: int) -> list[Saved]:
    """All models in the shape of a recipe: its dimension, layers and global batch.

    Args:
        recipe: by name.
        num_ranks: that share its global batch.
    """
    config = load_config(recipe)
    batch_size = config.data.global_batch_size // num_ranks
    bags = BAG_SIZES if recipe in MULTI_HOT else (1,) * len(ROWS)
    unique = [expected_unique(rows, batch_size * bag) for rows, bag in zip(ROWS, bags, strict=True)]
    return [
        Saved(recipe, model, num_ranks, batch_size, sum(unique), _traffic(config, model, num_ranks, unique))
        for model in MODELS
    ]


def expected_unique(rows: int, draws: int) -> float:
    """How many rows of a table are seen, on average, in so many lookups: `sum of 1 - (1 - p)^draws`."""
    probabilities = Popularity(rows).probabilities(rows - 1) if rows > 2 else np.ones(1)
    return float(-np.expm1(draws * np.log1p(-np.minimum(probabilities, 1 - 1e-12))).sum())


def _traffic(config: Config, kind: ModelKind, num_ranks: int, unique_rows: Sequence[float]) -> Traffic:
    shape = replace(config.model, kind=kind)
    features = [Feature(name=f"cat_{place}", rows=rows) for place, rows in enumerate(ROWS)]
    with torch.device("meta"):
        model = build_model(shape, features, NUM_DENSE, torch.float32)
    return traffic_of(model, num_ranks, config.data.global_batch_size // num_ranks, unique_rows)


def _told(line: Saved) -> str:
    found = line.traffic
    sent = [f"{each / 1e6:>8.2f} MB" for each in (found.split, found.all_to_all, found.pull_and_push)]
    shares = f"{found.saved:>8.1%} of pull, push {found.saved_a2a:>8.1%} of all-to-all"
    return f"{line.recipe:<13} {line.model:<7} {line.num_ranks:>5} {' '.join(sent)} {shares}"


if __name__ == "__main__":
    raise SystemExit(main())
