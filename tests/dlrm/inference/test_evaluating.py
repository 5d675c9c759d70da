"""A saved run has its own report's figures, by slice those of the samples in it, and errors of one line."""

import json
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from dlrm import evaluate
from dlrm.inference import open_run
from dlrm.inference.evaluating import EvaluationJob, evaluate_run, format_evaluation
from tests.readmes import as_run, command
from tests.readmes import run as run_command


@pytest.fixture(scope="module")
def run(train):
    """Folder of a run of 8 steps, saved at steps 4 and 8; the best is one of both."""
    return train("train.keep_best=log_loss", "train.evaluate_every_steps=4")[0]


@pytest.fixture(scope="module")
def samples(run, small_dataset):
    """The test day with the model's logits."""
    with open_run(run) as opened:
        logits = [opened.logits(batch)[: batch.num_valid].numpy() for batch in opened.loader]
    day = pl.read_parquet(small_dataset / "day=2" / "*.parquet")
    return day.with_columns(logit=np.concatenate(logits).astype(np.float64))


def test_figures_are_those_of_the_run_itself(run):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reported = {line["step"]: line for line in lines if line["kind"] == "evaluation"}
    best = min(reported.values(), key=lambda line: line["log_loss"])
    for save, line in (("newest", reported[8]), ("best", best)):
        result = evaluate_run(EvaluationJob(run=run, save=save))
        assert (result.step, result.days) == (line["step"], (2,))
        metrics = asdict(result.metrics)
        for name in ("auc", "log_loss", "normalized_entropy", "calibration"):
            assert metrics[name] == line[name]
    assert 0.5 < result.best_auc < 1


def test_slices_have_the_metrics_of_their_samples(run, samples):
    result = evaluate_run(EvaluationJob(run=run, by=("cat_0", "cat_8", "frequency", "frequency:cat_8")))
    for feature in ("cat_0", "cat_8"):
        sizes = samples[feature].value_counts().rows()
        named = {each.name for each in result.slices[feature]}
        assert len(named) == min(len(sizes), 21)
        largest = max(sizes, key=lambda each: each[1])
        assert result.slices[feature][0].metrics.num_samples == largest[1]
        for value, size in sizes:
            found = [each.metrics for each in result.slices[feature] if each.name == f"id {value}"]
            assert [each.num_samples for each in found] == [size] * len(found)
            if found and (found[0].auc is not None):
                check(found[0], samples.filter(pl.col(feature) == value))
    for slices in result.slices.values():
        assert sum(each.metrics.num_samples for each in slices) == len(samples)
        assert sum(each.metrics.num_clicks for each in slices) == samples["label"].sum()
    text = format_evaluation(result)
    assert text.count("id 1 ") == 2
    assert "frequency:cat_8" in text


def check(metrics, samples):
    probability = 1 / (1 + np.exp(-samples["logit"].to_numpy()))
    assert metrics.auc == pytest.approx(roc_auc_score(samples["label"], probability))
    assert metrics.log_loss == pytest.approx(log_loss(samples["label"], probability, labels=[0, 1]), rel=1e-6)
    assert metrics.calibration == pytest.approx(probability.sum() / samples["label"].sum(), rel=1e-6)


def test_results_are_written_for_machines_and_drawn(run, small_dataset, tmp_path, monkeypatch, capsys):
    """By the commands of the README."""
    monkeypatch.chdir(tmp_path)
    as_run(run)
    Path("datasets").mkdir()
    Path("datasets", "small").symlink_to(small_dataset)
    run_command(command("dlrm/README.md", "--by cat_0"))
    assert "AUC  " in capsys.readouterr().out
    assert Path("plots", "calibration.png").stat().st_size > 1000
    run_command(command("dlrm/README.md", "--json"), "--by", "cat_8", "--json", "new/figures.json")
    written = json.loads(Path("new", "figures.json").read_text())
    assert written["days"] == [0, 1]
    assert written["metrics"]["num_samples"] == 512
    assert sum(each["metrics"]["num_samples"] for each in written["slices"]["cat_8"]) == 512
    assert sum(each["num_samples"] for each in written["calibration"]) == 512


def test_days_that_were_trained_on_are_told(run, caplog):
    evaluate_run(EvaluationJob(run=run, days=(1,)))
    assert "days [1] were trained on" in caplog.text


@contextmanager
def hidden(folder):
    folder.rename(folder.with_suffix(".hidden"))
    yield
    folder.with_suffix(".hidden").rename(folder)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--by", "cat_99"],
            "--by cat_99: cat_99 is no feature of the data; choose frequency or some of cat_0,",
        ),
        (["--by", "frequency:x"], "--by frequency:x: x is no feature of the data"),
        (["--days", "7"], "the data set has no day [7]; it has days [0, 1, 2]"),
        (["--data", "nowhere"], "nowhere holds no dataset.json"),
        (["--save", "latest"], "invalid choice: 'latest'"),
        (["--plot", "/proc/x"], "/proc/x cannot be made"),
    ],
)
def test_mistakes_are_told_in_one_line(run, options, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dlrm.evaluate", "--run", str(run), *options])
    assert evaluate.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dlrm.evaluate: ")
    assert message in line


def test_a_run_without_saves_is_told_what_to_do(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["dlrm.evaluate", "--run", str(run)])
    with hidden(run / "checkpoint"):
        assert evaluate.main() == 2
    assert "Train it with checkpoint.every_steps" in capsys.readouterr().err


def test_the_data_of_the_run_is_known_by_any_name(run, small_dataset, tmp_path, caplog):
    (tmp_path / "link").symlink_to(small_dataset)
    for name in (f"{small_dataset}/", str(tmp_path / "link")):
        assert evaluate_run(EvaluationJob(run=run, data_uri=name)).days == (2,)
        evaluate_run(EvaluationJob(run=run, data_uri=name, days=(0,)))
        assert "days [0] were trained on" in caplog.text
        caplog.clear()


def test_slices_of_a_model_without_logits_are_refused_also_in_one_batch(train, small_log):
    dynamic = ("tables.dynamic=['page']", "tables.dynamic_rows=40", "data.global_batch_size=400")
    folder, _ = train(*dynamic, "checkpoint.every_steps=1", data=small_log, own="WithoutLogits")
    assert not evaluate_run(EvaluationJob(run=folder)).calibration
    with pytest.raises(ValueError, match="gives no logits, and so no metrics by slice: leave --by out"):
        evaluate_run(EvaluationJob(run=folder, by=("user",)))
