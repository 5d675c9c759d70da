"""Programs give the logits of the trainer; what cannot be exported is refused, and leaves nothing."""

import json
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnx.reference
import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch.utils._pytree import tree_leaves

from cpr.shards import find_shards
from data.loader import DataLoader, LoaderConfig
from dlrm.inference.program.exporting import ExportJob, export
from dlrm.inference.program.tracing import inputs_of
from dlrm.scorer import METADATA_NAME
from tests.readmes import as_run, command, run

SMALL = ("train.precision=fp32", "model.embedding_dim=8", "model.bottom_mlp=[8]", "model.top_mlp=[8,1]")
DYNAMIC = ("tables.dynamic=['page']", "tables.dynamic_rows=40")
KINDS = ("dlrm", "dcnv2", "deepfm", "fm", "lr")


def batch_of(dataset, size=256):
    config = LoaderConfig(batch_size=size, shuffle=False, drop_last=False, window_batches=1)
    loader = DataLoader(str(dataset), config, days=[1])
    batch = next(iter(loader))
    loader.close()
    return batch, loader.manifest.features


def load(path):
    extra = {METADATA_NAME: ""}
    program = torch.export.load(path, extra_files=extra)
    return program.module(), json.loads(extra[METADATA_NAME])


@pytest.mark.system  # not for its processes, but for the time that tracing takes
@pytest.mark.parametrize(
    ("kind", "strategy"), [*((kind, "torchrec") for kind in KINDS), ("dcnv2", "des"), ("deepfm", "des")]
)
def test_a_program_gives_the_logits_of_the_trainer(kind, strategy, train, small_log, tmp_path):
    """Lists of ids, weights, and a dynamic table whose rows were taken over by other ids.

    Under `des` the weights of the first layers were saved as tables.
    """
    settings = (f"model.kind={kind}", f"sharding.strategy={strategy}")
    folder, model = train(*SMALL, *DYNAMIC, *settings, data=small_log)
    if strategy == "des":
        assert any(".first." in shard.table_fqn for shard in find_shards(model))
    export(ExportJob(run=folder, out=tmp_path / "model.pt2"))
    program, described = load(tmp_path / "model.pt2")
    model.eval()
    for size in (256, 1):
        batch, features = batch_of(small_log, size)
        with torch.no_grad():
            expected = model(batch.dense, batch.sparse)
            assert torch.allclose(program(*inputs_of(batch, features)), expected, rtol=0, atol=1e-6)
    assert described["run"]["step"] == 8
    assert list(tmp_path.iterdir()) == [tmp_path / "model.pt2"]


@pytest.fixture(scope="module")
def trained(train, small_log):
    return train(*SMALL, *DYNAMIC, data=small_log)


def test_metadata_say_what_goes_in_and_where_it_comes_from(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    as_run(trained[0])
    run(command("dlrm/README.md", "--rows int8"))
    _, described = load("small.pt2")
    assert described["dense"] == ["age", "price"]
    assert described["features"][1] == {"name": "items", "rows": 30, "weights": "item_weights"}
    assert (described["label"], described["rows"], described["encoder"]) == ("click", "int8", None)
    assert described["tables"]["sparse.tables.embedding_bags.user"] == {"rows": 50, "columns": 8}
    lines = map(json.loads, (trained[0] / "metrics.jsonl").read_text().splitlines())
    assert described["run"]["auc"] == [line["auc"] for line in lines if line["kind"] == "evaluation"][-1]


@pytest.mark.system
def test_int8_rows_hardly_change_the_auc(train, small_dataset, tmp_path):
    folder, _ = train("train.precision=fp32", data=small_dataset)
    config = LoaderConfig(batch_size=256, shuffle=False, drop_last=False, window_batches=1)
    loader = DataLoader(str(small_dataset), config, days=[2])
    batch, aucs = next(iter(loader)), []
    loader.close()
    for rows in ("fp32", "int8"):
        export(ExportJob(run=folder, out=tmp_path / f"{rows}.pt2", rows=rows))
        program, _ = load(tmp_path / f"{rows}.pt2")
        with torch.no_grad():
            logits = program(*inputs_of(batch, loader.manifest.features))
        aucs.append(roc_auc_score(batch.labels, logits))
    assert abs(aucs[0] - aucs[1]) < 0.0005


@pytest.mark.system
def test_onnx_gives_the_same_logits_and_refuses_dynamic_tables(
    trained, train, small_log, tmp_path, monkeypatch
):
    with pytest.raises(
        ValueError, match=r"exporter does not take this program \(.*searchsorted.*use --format"
    ):
        export(ExportJob(run=trained[0], out=tmp_path / "model.onnx", format="onnx"))
    assert not any(tmp_path.iterdir())
    log = shutil.copytree(small_log, tmp_path / "log")
    manifest = json.loads((log / "dataset.json").read_text())
    del manifest["features"][2]
    (log / "dataset.json").write_text(json.dumps(manifest))
    folder, model = train(*SMALL, data=log)
    monkeypatch.chdir(tmp_path)
    as_run(folder)
    run(command("dlrm/README.md", "--format onnx"))
    program = onnx.load(tmp_path / "model.onnx")
    batch, features = batch_of(log, 5)
    names = [each.name for each in program.graph.input]
    inputs = [each.numpy() for each in tree_leaves(inputs_of(batch, features))]
    found = onnx.reference.ReferenceEvaluator(program).run(None, dict(zip(names, inputs, strict=True)))[0]
    with torch.no_grad():
        expected = model.eval()(batch.dense, batch.sparse)
    assert np.allclose(found, expected, rtol=0, atol=1e-6)
    described = {entry.key: entry.value for entry in program.metadata_props}[METADATA_NAME]
    assert json.loads(described)["format"] == "cpr-program"


@pytest.mark.system
def test_a_program_needs_torch_alone(trained, small_log, tmp_path):
    export(ExportJob(run=trained[0], out=tmp_path / "model.pt2"))
    batch, features = batch_of(small_log, 7)
    torch.save(inputs_of(batch, features), tmp_path / "inputs.pt")
    source = """
import sys, torch
class Refuse:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in {"torchrec", "fbgemm_gpu", "cpr", "data", "dlrm"}:
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
program = torch.export.load(sys.argv[1]).module()
print(program(*torch.load(sys.argv[2])).tolist())
"""
    command = [sys.executable, "-I", "-c", source, tmp_path / "model.pt2", tmp_path / "inputs.pt"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True, text=True).stdout
    with torch.no_grad():
        expected = trained[1].eval()(batch.dense, batch.sparse).tolist()
    assert json.loads(said) == pytest.approx(expected, abs=1e-6)


@pytest.mark.system
def test_what_a_bf16_run_differs_by_is_stated(train, small_log, tmp_path, caplog):
    folder, model = train(*SMALL[1:], *DYNAMIC, data=small_log)
    with caplog.at_level("INFO", "dlrm"):
        export(ExportJob(run=folder, out=tmp_path / "model.pt2"))
    program, described = load(tmp_path / "model.pt2")
    batch, features = batch_of(small_log)
    with torch.no_grad():
        difference = (
            (program(*inputs_of(batch, features)) - model.eval()(batch.dense, batch.sparse)).abs().max()
        )
    assert described["model"]["trained_in"] == "bf16"
    assert described["model"]["largest_difference"] == pytest.approx(float(difference), abs=1e-6)
    assert "trained in bf16 and the program computes in fp32: on 256 samples" in caplog.text


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "Branching",
            r"cannot trace .*own:Branching: .*own\.py, line \d+\)\. Its forward must not depend on",
        ),
        ("Foreign", r"own:Foreign uses the operator fbgemm\.\S+, which torch alone does not have"),
        ("Counting", r"own:Counting gives other outputs than the model, by"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused(kind, message, trained, train, small_log, tmp_path, capsys):
    folder, _ = train(*DYNAMIC, own=kind, data=small_log)
    with pytest.raises(ValueError, match=message):
        export(ExportJob(run=folder, out=tmp_path / "model.pt2"))
    assert "def forward" not in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.mark.system
def test_a_sequence_model_of_the_user_is_traced(train, small_log, tmp_path):
    folder, model = train(SMALL[0], *DYNAMIC, own="Sequences", data=small_log)
    export(ExportJob(run=folder, out=tmp_path / "model.pt2"))
    program, described = load(tmp_path / "model.pt2")
    assert (described["with_one_id"], described["least_samples"]) == (["user", "page"], 2)
    batch, features = batch_of(small_log)
    with torch.no_grad():
        expected = model.eval()(batch.dense, batch.sparse)
        assert torch.allclose(program(*inputs_of(batch, features)), expected, rtol=0, atol=1e-6)


@pytest.mark.system
def test_outputs_in_a_class_of_the_user_become_a_dict(train, small_log, tmp_path):
    folder, model = train(SMALL[0], *DYNAMIC, own="InClass", data=small_log)
    export(ExportJob(run=folder, out=tmp_path / "model.pt2"))
    program, _ = load(tmp_path / "model.pt2")
    batch, features = batch_of(small_log)
    with torch.no_grad():
        found, expected = program(*inputs_of(batch, features)), model.eval()(batch.dense, batch.sparse)
    assert list(found) == ["pairs", "dense"]
    assert torch.allclose(found["pairs"], expected.pairs, rtol=0, atol=1e-6)
    assert torch.equal(found["dense"], expected.dense)


def test_mistakes_leave_nothing_behind(trained, tmp_path, monkeypatch):
    def refused(message, error=ValueError, **options):
        with pytest.raises(error, match=message):
            export(ExportJob(**{"run": trained[0], "out": tmp_path / "model.pt2", **options}))
        assert not (tmp_path / "model.pt2").exists()

    refused("is not the folder of a run", run=tmp_path)
    refused("nothing was ever saved in .*best.*train.keep_best", save="best")
    (tmp_path / "taken").write_text("")
    refused("taken exists; remove it, or choose another --out", out=tmp_path / "taken")
    monkeypatch.setattr("dlrm.inference.program.saved.host_memory_bytes", lambda: 1000)
    refused(r"the program needs .* this machine has 1 kB.*--rows int8")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("start it without torchrun")
