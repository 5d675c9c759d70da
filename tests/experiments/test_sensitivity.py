import json

import pytest

from data.dataset import DatasetManifest
from experiments.emulation import runs as emulation_runs
from experiments.sensitivity import OTHERS, PAPER, main, plan


@pytest.fixture
def made_up(monkeypatch):
    """More failures and more lost nodes lose more; so do other schemes than the paper's."""

    def emulated(runs, _):
        for run in runs:
            lost = run.failures * run.nodes_lost * (2 if run.scheme in OTHERS else 1)
            lost *= run.scheme != "none"
            yield run, {"auc": 0.75 + run.seed / 100 - lost / 1e4, "pls": 0.05 * run.nodes_lost}

    monkeypatch.setattr(emulation_runs, "_emulated", emulated)
    monkeypatch.setattr("experiments.harness.samples.generate", lambda config, folder: None)


def test_other_data_keeps_its_skew(tmp_path, monkeypatch, made_up):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "criteo").mkdir()
    (tmp_path / "criteo/dataset.json").write_text(DatasetManifest(features=(), parts=()).to_json())
    assert main(["--quick", "criteo"]) == 0
    figures = json.loads((tmp_path / "runs/quick/sensitivity.json").read_text())["figures"]
    assert "auc_delta_mfu_usual" in figures
    assert not [name for name in figures if "skew" in name]


def test_every_run_has_its_run_without_failures_just_before_or_earlier():
    seen = set()
    for run in plan(2):
        assert run not in seen
        seen.add(run)
        assert run.without_failures in seen
    assert {run.scheme for run in seen} == {"none", *PAPER, *OTHERS}
