"""The schemas of `examples/own_data`: the page's own commands, on generated tables and on real files."""

import os
import re
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

import data.convert.__main__
from data.dataset import read_manifest
from data.loader import DataLoader, LoaderConfig
from examples.own_data import sample
from tests.readmes import COMMAND_LINES, ROOT, blocks, run

FOLDER = ROOT / "examples" / "own_data"
PAGE = FOLDER / "README.md"
ROWS = {"movielens": 60_000, "avazu": 60_000, "log": 60_000}


def commands(program):
    """The page's commands of a program, or of a module after `python -m`, as lists of words."""
    return [words for block, words in COMMAND_LINES if block.page == PAGE and program in (words[0], words[2])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the page's commands up to the conversion have run, and what they printed."""
    folder, there = tmp_path_factory.mktemp("own_data"), Path.cwd()
    (folder / "examples").symlink_to(ROOT / "examples")
    os.chdir(folder)
    try:
        for words in commands("examples.own_data.sample"):
            run(words)
        (block,) = [block for block in blocks("python") if block.page == PAGE]
        exec(block.text, {})
        for words in commands("data.convert"):
            run(words)
    finally:
        os.chdir(there)
    return folder


def test_every_schema_has_its_commands():
    named = {Path(words[3]).name for words in commands("data.convert")}
    assert named == {path.name for path in FOLDER.glob("*.toml")}
    assert {words[3] for words in commands("examples.own_data.sample")} == set(sample.TABLES)


@pytest.mark.parametrize("name", ROWS)
def test_samples_become_data_sets_with_all_rows(folder, name):
    manifest = read_manifest(str(folder / "datasets" / name))
    assert manifest.num_rows == ROWS[name]
    assert len(manifest.days) == (2 if name == "movielens" else sample.NUM_DAYS)


def test_ratings_of_four_and_more_are_clicks_and_genres_a_list(folder):
    made = pl.read_parquet(folder / "datasets" / "movielens" / "day=*" / "*.parquet", hive_partitioning=False)
    rated = pl.read_parquet(folder / "rated.parquet")
    assert made["rating"].sum() == (rated["rating"] >= 4).sum()
    lengths = rated["genres"].str.split("|").list.len()
    assert made["genres"].list.len().to_list() == lengths.to_list()  # both are in order of time


def test_the_log_gives_weighted_lists_and_standardized_numbers(folder):
    uri = str(folder / "datasets" / "log")
    loader = DataLoader(uri, LoaderConfig(batch_size=1000), days=[0])
    batch = next(iter(loader))
    loader.close()
    weights = batch.sparse["seen"].weights()
    assert batch.sparse["seen"].lengths().max() == sample.LIST_LENGTH
    assert 0 <= weights.min() < weights.max() <= 1
    assert batch.dense.abs().mean() < 2


@pytest.mark.system
def test_the_page_shows_what_converting_and_training_print(folder, capsys, monkeypatch, lender):
    (words,) = [words for words in commands("data.convert") if "log.parquet" in words]
    monkeypatch.chdir(folder)
    run([*words[:-1], "datasets/again"])
    (shown,) = [block.text for block in blocks("text") if block.page == PAGE]
    assert capsys.readouterr().out == shown.replace("datasets/log", "datasets/again")
    (words,) = commands("torchrun")
    as_forks, place = [sys.executable, "-m", "tests.programs"], words.index("-m")
    done = subprocess.run(
        [
            *as_forks,
            "torch.distributed.run",
            "--standalone",
            *words[1:place],
            *as_forks[1:],
            *words[place + 1 :],
        ],
        env={**os.environ, **lender},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    auc = float(re.search(r"^AUC +([\d.]+)$", done.stdout, re.M)[1])
    assert auc > 0.6  # by chance 0.5; what the samples hide can be learned


@pytest.mark.parametrize(
    ("name", "variable"), [("movielens", "CPR_MOVIELENS_RATINGS"), ("avazu", "CPR_AVAZU_TRAIN")]
)
def test_real_files_are_converted(name, variable, tmp_path):
    """The variables name `ratings.csv` (`movies.csv` beside it) and `train.csv` or `train.gz`."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no file")
    file = Path(os.environ[variable])
    if name == "movielens":
        movies = pl.scan_csv(file.with_name("movies.csv"))
        joined = pl.scan_csv(file).join(movies, on="movieId", how="left", maintain_order="left")
        joined.sink_parquet(file := tmp_path / "rated.parquet")
    out = tmp_path / name
    assert data.convert.__main__.main([str(FOLDER / f"{name}.toml"), str(file), "--out", str(out)]) == 0
    assert read_manifest(str(out)).num_rows > 0
