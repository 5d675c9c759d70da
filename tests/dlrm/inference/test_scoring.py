"""Scores of a data set: all rows in their order, the same bytes after any interruption and nothing half."""

import json
import shutil

import numpy as np
import polars as pl
import pytest
import torch
from scipy.special import expit

from data.loader import DataLoader, LoaderConfig
from dlrm.config.recipe import load_config
from dlrm.inference import OpenedRun, open_run, scoring, unfinished
from dlrm.inference.scoring import ScoreJob, score
from dlrm.training.data import prepare
from tests.dlrm.inference.conftest import ALONE


@pytest.fixture(scope="module")
def trained(train):
    return train("data.window_batches=3")


@pytest.fixture
def job(trained, tmp_path):
    return ScoreJob(run=trained[0], out=tmp_path / "scores.parquet")


def changed(job, **changes):
    return ScoreJob(**{**vars(job), **changes})


def logits_of(model, dataset, days):
    """Of the rows in their order, one batch of 32 after the other."""
    model.eval()
    config = LoaderConfig(batch_size=32, shuffle=False, drop_last=False, window_batches=1)
    loader = DataLoader(str(dataset), config, days=days)
    with torch.no_grad():
        logits = [model(batch.dense, batch.sparse)[: batch.num_valid] for batch in loader]
    loader.close()
    return torch.cat(logits).numpy()


def test_rows_keep_their_order_and_their_columns(job, trained, small_dataset):
    score(changed(job, days=[0, 2], keep=["cat_3", "int_0"]))
    rows = pl.read_parquet(job.out)
    assert rows.columns == ["score", "logit", "day", "label", "cat_3", "int_0"]
    data = pl.concat(pl.read_parquet(small_dataset / f"day={day}", hive_partitioning=False) for day in (0, 2))
    assert rows["day"].to_list() == [0] * 256 + [2] * 256
    assert rows.select("label", "cat_3", "int_0").equals(data.select("label", "cat_3", "int_0"))
    expected = logits_of(trained[1], small_dataset, [0, 2])
    assert np.array_equal(rows["logit"].to_numpy(), expected)
    assert np.array_equal(rows["score"].to_numpy(), expit(expected.astype(np.float64)).astype(np.float32))
    assert list(job.out.parent.iterdir()) == [job.out]


class Killed(BaseException):
    pass


@pytest.mark.parametrize("place", ["append", "_write", "finish"])
def test_an_interrupted_job_ends_with_the_same_bytes(place, job, monkeypatch, tmp_path):
    monkeypatch.setattr(unfinished, "POSITION_EVERY_S", 0)
    score(changed(job, out=tmp_path / "whole.parquet"))
    method, calls = getattr(unfinished.UnfinishedScores, place), []

    def killed_at_times(self, *arguments, **options):
        """Before the work, after it, or in the midst of it."""
        calls.append(None)
        if len(calls) % 4 == 1:
            raise Killed
        if len(calls) % 4 == 2 and place == "append":
            with self.logits_path.open("ab") as file:
                file.write(b"half of a row of logi")
            raise Killed
        method(self, *arguments, **options)
        if len(calls) % 4 == 0:
            raise Killed

    monkeypatch.setattr(unfinished.UnfinishedScores, place, killed_at_times)
    was_killed = 0
    while was_killed < 30:
        try:
            score(job)
            break
        except Killed:
            was_killed += 1
            assert place == "finish" or not job.out.exists()
    assert was_killed
    assert job.out.read_bytes() == (tmp_path / "whole.parquet").read_bytes()


def test_a_begun_job_keeps_its_save_and_refuses_another_job(job, trained, monkeypatch, tmp_path):
    monkeypatch.setattr(unfinished, "POSITION_EVERY_S", 0)
    run = shutil.copytree(trained[0], tmp_path / "run")
    newest = sorted((run / "checkpoint" / "saves").iterdir())[-1]
    newest.rename(tmp_path / "later")
    job = changed(job, run=run)
    write = scoring._write

    def killed(*arguments):
        raise Killed

    monkeypatch.setattr(scoring, "_write", killed)
    with pytest.raises(Killed):
        score(job)
    monkeypatch.setattr(scoring, "_write", write)
    (tmp_path / "later").rename(newest)
    for change, difference in (({"run": trained[0]}, "run: there"), ({"days": [1]}, "days: there")):
        with pytest.raises(
            ValueError, match=rf"unfinished belongs to another configuration \(.*{difference}"
        ):
            score(changed(job, **change))
    score(job)
    score(changed(job, out=tmp_path / "of_newest.parquet"))
    logits, others = (pl.read_parquet(path)["logit"] for path in (job.out, tmp_path / "of_newest.parquet"))
    assert not logits.equals(others)
    with pytest.raises(
        ValueError, match=r"scores\.parquet belongs to another configuration \(step: there 4,"
    ):
        score(job)


def test_a_finished_job_is_left_as_it_is(job, monkeypatch):
    score(job)
    written = job.out.stat()
    score(job)
    again = job.out.stat()  # with another time of access
    assert (again.st_ino, again.st_mtime_ns) == (written.st_ino, written.st_mtime_ns)
    monkeypatch.setattr(scoring, "open_run", None)  # what does not fit is refused before it
    with pytest.raises(ValueError, match=r'scores\.parquet belongs .* \(keep: there \[\], now \["int_0"\]\)'):
        score(changed(job, keep=["int_0"]))
    with pytest.raises(ValueError, match=r"--keep: .* has no column user; it has label, int_0"):
        score(changed(job, keep=["user"]))
    job.out.write_bytes(b"something else")
    with pytest.raises(ValueError, match=r"scores\.parquet exists; remove it, or choose another --out"):
        score(job)
    assert job.out.read_bytes() == b"something else"


def test_a_save_that_is_gone_is_named(job, trained, tmp_path):
    folder = tmp_path / "scores.parquet.unfinished" / "state"
    folder.mkdir(parents=True)
    begun = {"run": str(trained[0].resolve()), "days": [0, 1, 2], "keep": [], "step": 6}
    (folder / "identity.json").write_text(json.dumps(begun))
    with pytest.raises(ValueError, match=r"no state of step 6; .*remove .*unfinished to begin again"):
        score(job)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"days": [7]}, r"the data set has no day \[7\]"),
        ({"data_uri": "nowhere"}, "nowhere holds no dataset"),
    ],
)
def test_mistakes_leave_nothing_behind(job, changes, message):
    with pytest.raises(ValueError, match=message):
        score(changed(job, **changes))
    assert list(job.out.parent.iterdir()) == []


def test_data_needs_no_labels(job, trained, small_dataset, tmp_path):
    folder = shutil.copytree(small_dataset, tmp_path / "unlabelled")
    manifest = json.loads((folder / "dataset.json").read_text())
    for part in manifest["parts"]:
        path = folder / part["path"]
        pl.read_parquet(path, hive_partitioning=False).drop("label").write_parquet(path, row_group_size=128)
        part["num_bytes"] = path.stat().st_size
    (folder / "dataset.json").write_text(json.dumps(manifest))
    refusal = r"has no labels: .* the column 'label'\. .* dlrm\.predict"
    with pytest.raises(ValueError, match=refusal), open_run(job.run, str(folder)):  # as dlrm.evaluate does
        pass
    with pytest.raises(ValueError, match=refusal):
        prepare(load_config("tiny", [f"data.uri={folder}"]), "tiny", ALONE)
    score(changed(job, data_uri=str(folder)))
    rows = pl.read_parquet(job.out)
    assert rows.columns == ["score", "logit", "day"]
    assert np.array_equal(rows["logit"].to_numpy(), logits_of(trained[1], small_dataset, [0, 1, 2]))


def test_nan_is_no_score(job, monkeypatch):
    monkeypatch.setattr(OpenedRun, "logits", lambda run, batch: torch.full([32], torch.nan))
    with pytest.raises(FloatingPointError, match="the model gives nan for row 0 of the data"):
        score(job)
    assert not any(job.out.parent.iterdir())


def test_a_label_has_its_own_column_or_none(train, small_log, tmp_path, caplog):
    """The label may have the name of a column that is made."""
    data = tmp_path / "data"
    shutil.copytree(small_log, data)
    for path in data.glob("*.parquet"):
        pl.read_parquet(path, hive_partitioning=False).rename({"click": "score"}).write_parquet(path)
    manifest = (data / "dataset.json").read_text().replace('"click"', '"score"')
    (data / "dataset.json").write_text(manifest)
    folder, _ = train("tables.dynamic=['page']", "tables.dynamic_rows=40", data=data)
    score(ScoreJob(run=folder, out=tmp_path / "scores.parquet"))
    rows = pl.read_parquet(tmp_path / "scores.parquet")
    assert rows.columns == ["score", "logit", "day"]
    assert rows["score"].dtype == pl.Float32
    assert "the label score is left out" in caplog.text


def test_logits_of_another_dtype_are_scored(train, small_log, tmp_path):
    dynamic = ("tables.dynamic=['page']", "tables.dynamic_rows=40", "train.precision=fp32")
    folder, _ = train(*dynamic, data=small_log, own="Doubled")
    score(ScoreJob(run=folder, out=tmp_path / "scores.parquet", days=[1]))
    with open_run(folder, days=[1]) as run, torch.no_grad():
        outputs = [run.model(batch.dense, batch.sparse)[: batch.num_valid] for batch in run.loader]
    found = pl.read_parquet(tmp_path / "scores.parquet")["logit"].to_numpy()
    assert np.array_equal(found, torch.cat(outputs).numpy())
