"""Bytes that operator splitting saves, by formula: `python -m experiments.splitting_bytes`.

The command prints, for every model and several numbers of ranks, the share of bytes saved against a parameter
server's pull and push of unique rows, and against TorchRec's all-to-all of pooled embeddings. The formulas
are in `dlrm.sharding.splitting.planning.savings`; `tests/system/sharding/test_wire.py` compares their parts
with counted bytes. As in the DES paper, the keys of the parameter server count and the ids of samples do not;
figures with ids are in `experiments.splitting`. The number of unique rows follows from the popularity of ids
in the synthetic data, which is fitted to Criteo. The command measures and stores nothing.
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
    """One line of the printed table."""

    recipe: str
    model: str
    num_ranks: int
    batch_size: int
    """Samples of one rank."""
    unique_rows: float
    """Unique rows among the samples of one rank, in all tables together."""
    traffic: Traffic


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0]).parse_args(arguments)
    columns = " ".join(f"{name:>11}" for name in ("split", "all-to-all", "pull, push"))
    print(f"{'recipe':<13} {'model':<7} {'ranks':>5} {columns}   saved")
    for recipe in RECIPES:
        for num_ranks in RANKS:
            for line in saved(recipe, num_ranks):
                print(_formatted(line))
    return 0


def saved(recipe: str, num_ranks: int) -> list[Saved]:
    """Traffic of all models in the shape of a recipe: its dimension, layers and global batch.

    Args:
        recipe: by name.
        num_ranks: number of ranks that share the global batch.
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
    """Expected number of unique rows of a table in `draws` lookups: the sum of `1 - (1 - p)^draws`."""
    probabilities = Popularity(rows).probabilities(rows - 1) if rows > 2 else np.ones(1)
    return float(-np.expm1(draws * np.log1p(-np.minimum(probabilities, 1 - 1e-12))).sum())


def _traffic(config: Config, kind: ModelKind, num_ranks: int, unique_rows: Sequence[float]) -> Traffic:
    shape = replace(config.model, kind=kind)
    features = [Feature(name=f"cat_{place}", rows=rows) for place, rows in enumerate(ROWS)]
    with torch.device("meta"):
        model = build_model(shape, features, NUM_DENSE, torch.float32)
    return traffic_of(model, num_ranks, config.data.global_batch_size // num_ranks, unique_rows)


def _formatted(line: Saved) -> str:
    found = line.traffic
    sent = [f"{each / 1e6:>8.2f} MB" for each in (found.split, found.all_to_all, found.pull_and_push)]
    shares = f"{found.saved:>8.1%} of pull, push {found.saved_a2a:>8.1%} of all-to-all"
    return f"{line.recipe:<13} {line.model:<7} {line.num_ranks:>5} {' '.join(sent)} {shares}"


if __name__ == "__main__":
    raise SystemExit(main())
