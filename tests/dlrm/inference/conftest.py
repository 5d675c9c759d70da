"""Data, and runs that were trained on it for a few steps and saved, to be opened."""

from contextlib import closing
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from data.dataset import DatasetManifest, Feature, Part
from dlrm.config.recipe import load_config
from dlrm.launch.device import Ranks
from dlrm.launch.stop_signal import StopSignal
from dlrm.training.build import build
from dlrm.training.data import prepare

ALONE = Ranks(rank=0, local_rank=0, world_size=1)


@pytest.fixture(scope="module")
def train(world_of_one, small_dataset, tmp_path_factory):
    """Trains 8 steps; gives the run's folder and the trained model."""

    def work(*overrides, data=small_dataset, own=""):
        """`own` is a class of `program.own`."""
        recipe = "tiny"
        runs = tmp_path_factory.mktemp("runs")
        settings = ("data.global_batch_size=32", "checkpoint.every_steps=4", "train.max_steps=8")
        if own:
            recipe = runs.with_suffix(".toml")
            recipe.write_text(f'model.kind = "tests.dlrm.inference.program.own:{own}"')
        config = load_config(
            str(recipe), [f"data.uri={data}", f"train.run_folder={runs}", *settings, *overrides]
        )
        with closing(prepare(config, "tiny", ALONE)) as inputs:
            trainer = build(inputs, StopSignal())
            with closing(trainer.replicas), closing(trainer.session), closing(trainer.telemetry):
                trainer.train()
        (folder,) = runs.iterdir()
        return folder, trainer.model

    return work


@pytest.fixture(scope="session")
def small_log(tmp_path_factory):
    """Two days of 400 samples: two dense columns, ids, lists of ids with weights, and raw ids."""
    folder, generator, parts = tmp_path_factory.mktemp("data") / "log", np.random.default_rng(0), []
    features = (
        Feature(name="user", rows=50),
        Feature(name="items", rows=30, weights="item_weights"),
        Feature(name="page", rows=0),
    )
    for day in (0, 1):
        lists = [generator.integers(0, 30, size) for size in generator.integers(0, 4, 400)]
        rows = pl.DataFrame(
            {
                "click": generator.integers(0, 2, 400).astype(np.int8),
                "age": generator.random(400, np.float32),
                "price": generator.random(400, np.float32),
                "user": generator.integers(0, 50, 400).astype(np.int32),
                "items": pl.Series(lists, dtype=pl.List(pl.Int32)),
                "item_weights": pl.Series(
                    [generator.random(len(each)) for each in lists], dtype=pl.List(pl.Float32)
                ),
                "page": generator.integers(0, 60, 400) * 2**40 - 2**44 + day,
            }
        )
        path = folder / f"day={day}.parquet"
        folder.mkdir(exist_ok=True)
        rows.write_parquet(path)
        parts.append(
            Part(
                path=path.name,
                day=day,
                num_rows=400,
                row_groups=(400,),
                num_bytes=path.stat().st_size,
                sha256="",
            )
        )
    manifest = DatasetManifest(features=features, parts=(), dense=("age", "price"), label="click")
    (folder / "dataset.json").write_text(replace(manifest, parts=tuple(parts)).to_json())
    return folder
