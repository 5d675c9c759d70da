"""A run that is opened has the trained model, changes nothing, and refuses what does not fit."""

import json
import shutil

import pytest
import torch

from cpr.shards import find_shards
from data.dataset import read_manifest
from data.synthetic import SyntheticConfig
from dlrm.inference import open_run
from dlrm.inference.program.exporting import ExportJob, export
from dlrm.metrics import ClickMetrics
from dlrm.telemetry.folder import DATA_NAME
from tests.datasets import generate_few


@pytest.fixture(scope="module")
def trained(train):
    return train("tables.optimizer=adagrad")


def files_of(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def scores(model, run):
    with torch.no_grad():
        return torch.cat([model(batch.dense, batch.sparse)[: batch.num_valid] for batch in run.loader])


def test_the_opened_model_is_the_trained_one(trained):
    folder, model = trained
    before = files_of(folder)
    with open_run(folder) as run:
        assert (run.state.step, run.manifest.days) == (8, (2,))
        model.eval()
        ours = torch.cat([run.logits(batch)[: batch.num_valid] for batch in run.loader])
        assert torch.equal(ours, scores(model, run))
        assert {name for shard in find_shards(run.model) for name in shard.columns} == {"weights"}
        metrics = ClickMetrics(run.device)
        for batch in run.loader:
            metrics.update(run.logits(batch)[: batch.num_valid], batch.labels[: batch.num_valid])
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    (reported,) = (line for line in lines if line["kind"] == "evaluation")
    assert metrics.compute().auc == pytest.approx(reported["auc"], abs=1e-12)
    assert files_of(folder) == before


def test_days_and_saves_can_be_chosen(trained, tmp_path):
    folder, _ = trained
    with open_run(folder, days="all", step=4) as run:
        assert (run.state.step, run.manifest.num_rows) == (4, 768)
    with open_run(folder, days=[0, 2]) as run:
        assert run.manifest.days == (0, 2)
    with (
        pytest.raises(ValueError, match=r"no state of step 5; steps that can be loaded: 4, 8"),
        open_run(folder, step=5),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"nothing was ever saved .* train\.keep_best, or take the newest"),
        open_run(folder, save="best"),
    ):
        pass
    shutil.copytree(folder, tmp_path / "run")
    (tmp_path / "run" / "checkpoint").rename(tmp_path / "run" / "best")
    with open_run(tmp_path / "run", save="best") as run:
        assert run.state.step == 8
    with (
        pytest.raises(ValueError, match=r"nothing was ever saved .* checkpoint\.every_steps"),
        open_run(tmp_path / "run"),
    ):
        pass


@pytest.mark.parametrize("kind", ["dlrm", "dcnv2", "deepfm", "fm", "lr"])
def test_dynamic_tables_give_rows_to_no_ids(kind, train):
    folder, model = train("tables.dynamic=['*']", "tables.dynamic_rows=500", f"model.kind={kind}")
    model.eval()
    with open_run(folder) as run:
        ours = torch.cat([run.logits(batch)[: batch.num_valid] for batch in run.loader])
        assert torch.equal(ours, scores(model, run))


@pytest.fixture(scope="module")
def other(small_dataset, tmp_path_factory):
    """Makes data of other samples whose manifest is changed."""
    folder = tmp_path_factory.mktemp("other") / "dataset"
    generate_few(
        SyntheticConfig(scale=1e-4, days=1, rows_per_day=100, rows_per_block=100, rows_per_file=100, seed=3),
        folder,
    )
    text = (folder / "dataset.json").read_text()

    def work(change=lambda manifest: None):
        manifest = json.loads(text)
        change(manifest)
        (folder / "dataset.json").write_text(json.dumps(manifest))
        return str(folder)

    return work


def test_other_data_is_scored_whole(trained, other, small_dataset, caplog):
    with open_run(trained[0], other()) as run:
        assert len(torch.cat([run.logits(batch)[: batch.num_valid] for batch in run.loader])) == 100
    assert read_manifest(other()).features == read_manifest(str(small_dataset)).features


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m["dense"].pop(), "among its dense columns, it lacks int_12"),
        (lambda m: m["features"].pop(3), "among its features, it lacks cat_3"),
        (
            lambda m: m["features"].insert(0, m["features"].pop()),
            "its features come in another order: cat_8, cat_0",
        ),
        (lambda m: m["features"][4].update(rows=7), r"feature cat_4 was trained as .*, and is .*rows=7"),
    ],
)
def test_data_with_other_columns_is_refused(trained, other, change, message):
    uri = other(change)
    with pytest.raises(ValueError, match=f"does not fit the run: {message}"), open_run(trained[0], uri):
        pass


def test_data_is_compared_with_the_save_where_that_of_the_run_is_gone(trained, other, tmp_path, caplog):
    folder = shutil.copytree(trained[0], tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["data"]["uri"] = str(tmp_path / "gone")
    (folder / "config.json").write_text(json.dumps(config))
    uri = other(lambda m: m["dense"].reverse())
    with pytest.raises(ValueError, match="its dense columns come in another order"), open_run(folder, uri):
        pass
    (folder / DATA_NAME).unlink()  # as of an older version
    with caplog.at_level("WARNING", "dlrm"), open_run(folder, other()) as run:
        assert run.state.step == 8
    assert "is not checked" in caplog.text
    with pytest.raises(ValueError, match="gone holds no dataset"), open_run(folder):
        pass


def encoded(manifest, digest):
    """Data of `data.convert` whose vocabulary of cat_4 has this digest."""
    manifest["schema"] = {
        "label": {"column": "label"},
        "sparse": [{"column": f["name"]} for f in manifest["features"]],
    }
    manifest["provenance"]["files"] = [{"path": "vocabulary/cat_4.parquet", "sha256": digest}]


def test_data_with_another_vocabulary_is_refused(trained, other, tmp_path):
    """Also at the place of the run's own data, where that was made again."""
    folder = shutil.copytree(trained[0], tmp_path / "run")
    for name in ("config.json", DATA_NAME):
        content = json.loads((folder / name).read_text())
        if name == DATA_NAME:
            encoded(content, "a")
        else:
            content["data"] |= {"uri": other()}
        (folder / name).write_text(json.dumps(content))
    for change in (lambda m: encoded(m, "a"), lambda m: None):  # also of data that does not say
        with open_run(folder, other(change), [0]):
            pass
    again = shutil.copytree(other(lambda m: encoded(m, "b")), tmp_path / "again")
    with pytest.raises(ValueError, match=r"of cat_4\. Convert .* --like"), open_run(folder, str(again), [0]):
        pass
    made_again = "was made again since .* of cat_4: ids mean other values now"
    with pytest.raises(ValueError, match=made_again), open_run(folder, days=[0]):
        pass
    with pytest.raises(ValueError, match=made_again):
        export(ExportJob(run=folder, out=tmp_path / "model.pt2"))
