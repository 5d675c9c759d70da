"""Commands of the READMEs run as they stand there, on small data and as one rank."""

import contextlib
import gzip
import json
import os
import re
import shlex
from pathlib import Path

import polars as pl
import pytest

from data.criteo import DENSE_NAMES
from data.dataset import read_manifest
from examples.small_data import write_dataset
from tests.data.prepare.conftest import make_lines
from tests.readmes import COMMAND_LINES, ROOT, RUN, blocks, command, commands_of, run

TAKEN = re.compile(r'\bcommand\(\s*"([^"]+)",\s*"([^"]+)"')
"""Where a test takes a command from a page, to run it."""
OTHERWISE = {
    "make demo": "tests/test_readmes.py",
    "cpr plan": "tests/test_readmes.py",
    "cpr simulate": "tests/test_readmes.py",
    "cpr clean": "tests/test_readmes.py",
    "cpr describe": "tests/test_readmes.py",
    "cpr verify": "tests/test_readmes.py",
    "cpr report": "tests/cpr/report/test_page.py",
    "cpr export": "tests/test_readmes.py",
    "cpr rescue": "tests/cpr/recovery/test_rescue.py",
    "dlrm.train --warm-start": "tests/dlrm/training/test_build.py",
    "-m dlrm.train --resume": "tests/system/training/test_resume.py",
    "cpr doctor": "tests/cpr/doctor/test_network.py",
    "cpr run": "tests/system/recovery/test_launch.py",
    "--recipe tiny --set checkpoint.every_steps=200": "tests/system/recovery/test_recovery.py",
    "CPR_FAULTS=faults.json": "tests/test_readmes.py",
    "examples.own_data.sample": "tests/examples/test_own_data.py",
    "data.convert examples/own_data": "tests/examples/test_own_data.py",
    "data.uri=datasets/log": "tests/examples/test_own_data.py",
    "torchrec_style.py": "tests/system/recovery/test_torchrec_style.py",
    "stream.uri=arriving": "tests/system/training/test_stream.py",
    "--recipe examples/two_tower.toml": "tests/system/training/test_examples.py",
    "--recipe examples/sequence.toml": "tests/system/training/test_examples.py",
    "data.prepare s3://": "tests/data/jobs/test_cluster.py",
    "dask": "tests/data/jobs/conftest.py",
    "experiments.recovery": "tests/experiments/recovery/test_run.py",
    "experiments.report": "tests/experiments/report/test_run.py",
}
"""Parts of commands, and the tests that run them, or the like of them on several ranks or machines."""
INSTALLS = ("pip install", "make install", ". .venv", "pytest")
"""Beginnings of commands that no test runs."""
FEW_STEPS = ("--set", "train.max_steps=3", "data.global_batch_size=100")
NARROW = (*FEW_STEPS, "model.bottom_mlp=[8,64]", "model.top_mlp=[8,1]")


def test_every_command_is_run_by_a_test():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    taken = {found for source in sources for found in TAKEN.findall(source)}
    run_here = {text for page, part in taken for text in map(shlex.join, commands_of(page)) if part in text}
    texts = {shlex.join(words) for _, words in COMMAND_LINES} - run_here
    texts = {text for text in texts if not any(each in text for each in INSTALLS)}
    assert {text for text in texts if not any(part in text for part in OTHERWISE)} == set()
    assert {part for part in OTHERWISE if not any(part in text for text in texts)} == set()
    assert all((ROOT / path).exists() for path in OTHERWISE.values())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the data set of `dlrm/README.md`, also under other names, and the run trained on it."""
    place = tmp_path_factory.mktemp("place")
    with contextlib.chdir(place):
        run(command("dlrm/README.md", "data.synthetic"))
        for name in ("tiny", "terabyte"):
            Path("datasets", name).symlink_to("small")
        Path("terabyte").symlink_to("datasets/small")
        Path("examples").symlink_to(ROOT / "examples")
        run(command("dlrm/README.md", "data.global_batch_size=200 checkpoint.every_steps=5"))
        (trained,) = Path("runs").iterdir()
        trained.rename(RUN)
    return place


@pytest.fixture(autouse=True)
def inside(place, monkeypatch):
    monkeypatch.chdir(place)


def newest_report():
    return json.loads(max(Path("runs").glob("*/report.json"), key=os.path.getmtime).read_text())


def test_a_run_is_resumed_for_another_epoch():
    run(command("dlrm/README.md", "--resume"))
    assert newest_report()["steps"] == 40


def test_the_best_state_is_kept_and_evaluated(capsys):
    run(command("dlrm/README.md", "train.keep_best"), "train.epochs=2")
    (folder,) = (path.parent for path in Path("runs").glob("*/best"))
    (words,) = re.findall(
        r"`(python -m dlrm.evaluate --run RUN_FOLDER[^`]*)`", (ROOT / "dlrm/README.md").read_text()
    )
    capsys.readouterr()
    run(words.replace("RUN_FOLDER", str(folder)).split())
    assert "AUC  " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "more"),
    [
        (command("README.md", "terabyte checkpoint.every_steps"), NARROW),
        (command("dlrm/comm/README.md", "comm.exchange=auto"), NARROW),
        (command("dlrm/comm/README.md", "sharding.data_parallel_gradients=rows"), NARROW),
        (command("dlrm/models/README.md", "examples/minimal.toml"), FEW_STEPS),
        (command("dlrm/README.md", "train.batching=dynamic"), FEW_STEPS),
    ],
)
def test_runs_with_other_settings(words, more):
    run(words, *more)
    assert newest_report()["steps"] == 3


@pytest.fixture(scope="module")
def tomorrow(place):
    """Data with more rows for `cat_2`, two new features, and without `cat_7`."""
    small = place / "datasets" / "small"
    rows = {feature.name: feature.rows for feature in read_manifest(str(small)).features}
    new = {"cat_26": pl.col("cat_7"), "cat_27": pl.col("cat_7")}
    rows = {**rows, "cat_2": rows["cat_2"] + 9, **dict.fromkeys(new, rows["cat_7"])}
    del rows["cat_7"]
    days = [
        pl.read_parquet(small / f"day={day}", hive_partitioning=False).with_columns(**new).drop("cat_7")
        for day in (0, 1, 2)
    ]
    write_dataset(place / "datasets" / "tomorrow", days, rows, DENSE_NAMES)


def test_a_warm_start_takes_other_data_and_with_words_other_tables(tomorrow, caplog):
    run(command("cpr/README.md", "--allow"), *FEW_STEPS)
    assert newest_report()["steps"] == 3
    assert "differs as" not in caplog.text, "a word was not needed"


def test_criteo_logs_are_prepared_and_verified(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [line + b"\n" for line in make_lines(300)]
    Path("train.txt").write_bytes(b"".join(lines))
    for day in (0, 1):
        Path(f"day_{day}.gz").write_bytes(gzip.compress(b"".join(lines)))
    run(command("README.md", "data.prepare"))
    run(command("data/README.md", "--verify"))
    assert "all digests and row counts are right" in capsys.readouterr().out
    run(command("data/README.md", "--min-count"))
    assert [read_manifest(name).num_rows for name in ("terabyte", "kaggle")] == [600, 300]


def test_synthetic_data_drifts(capsys):
    run(command("data/README.md", "--drift"), "--rows-per-day", "100", "--scale", "1e-4")
    assert "made synthetic: 7 days x 100 rows" in capsys.readouterr().out


def test_parquet_that_is_fit_is_indexed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("python") if "IndexSchema" in block.text]
    exec(block.text, {})
    run(command("data/README.md", "clicks --schema"))
    made = Path("clicks", "dataset.json").read_bytes()
    capsys.readouterr()
    run(command("data/README.md", "clicks --guess"))
    Path("schema.toml").write_text(capsys.readouterr().out)
    run(command("data/README.md", "clicks --schema"))
    assert Path("clicks", "dataset.json").read_bytes() != made


def test_versions_that_fit_are_said():
    run(command("README.md", "cpr.versions"))
