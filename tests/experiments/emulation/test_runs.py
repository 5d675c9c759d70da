import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from data.dataset import DatasetManifest
from experiments.emulation import runs as emulation_runs
from experiments.emulation.emulation import Run
from experiments.emulation.runs import measure, measure_experiment
from experiments.emulation.worker import EmulatedWorkload
from experiments.harness import samples
from experiments.harness.launch import worker_environment


@pytest.fixture
def emulated(monkeypatch):
    """The runs that were asked for, in order, none of them really done."""
    asked = []

    def emulate(runs, _):
        for run in runs:
            asked.append(run.name)
            yield run, {"auc": 0.7 + run.seed / 100, "pls": 0.1}

    monkeypatch.setattr(emulation_runs, "_emulated", emulate)
    return asked


@pytest.fixture
def workload(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "dataset.json").write_text(DatasetManifest(features=(), parts=()).to_json())
    return EmulatedWorkload(dataset=str(tmp_path / "data"), covering=0.9)


RUNS = [Run(scheme=scheme, seed=seed) for seed in (0, 1) for scheme in ("none", "mfu")]


def test_runs_are_measured_once_and_kept_also_if_interrupted(tmp_path, emulated, workload, monkeypatch):
    whole = emulation_runs._emulated

    def interrupted(runs, shared):
        yield from list(whole(runs, shared))[:1]
        raise KeyboardInterrupt

    monkeypatch.setattr(emulation_runs, "_emulated", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure(RUNS[:2], workload, tmp_path)
    monkeypatch.setattr(emulation_runs, "_emulated", whole)
    emulated.clear()
    rows = measure(RUNS, workload, tmp_path)
    assert emulated == [run.name for run in RUNS[1:]], "in the order of the plan, each once"
    assert rows[RUNS[0]] == {**asdict(RUNS[0]), "auc": 0.7, "pls": 0.1}
    assert rows[RUNS[3]]["auc"] == pytest.approx(0.71)


def test_other_data_steps_or_code_are_measured_again(tmp_path, emulated, workload, monkeypatch):
    def times():
        emulated.clear()
        measure(RUNS[:1], workload, tmp_path)
        return len(emulated)

    assert (times(), times()) == (1, 0)
    (tmp_path / "data" / "dataset.json").write_text('{"other": 1}')
    assert (times(), times()) == (1, 0)
    workload = replace(workload, max_steps=3)
    assert (times(), times()) == (1, 0)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("a = 1")
    monkeypatch.setattr(emulation_runs, "ROOT", tmp_path)
    monkeypatch.setattr(emulation_runs, "CODE", ("code/*.py",))
    assert (times(), times()) == (1, 0)
    (tmp_path / "code" / "a.py").write_text("a = 2")
    assert (times(), times()) == (1, 0)


def test_the_code_that_decides_a_run_is_named():
    found = {path for pattern in emulation_runs.CODE for path in emulation_runs.ROOT.glob(pattern)}
    names = {str(path.relative_to(emulation_runs.ROOT)) for path in found}
    assert {
        "cpr/checkpoint/checkpointer.py",
        "cpr/priority/prioritizer.py",
        "data/loader/loader.py",
        "dlrm/models/dlrm.py",
        "dlrm/recipes/tiny.toml",
        "experiments/emulation/worker.py",
        "experiments/harness/training.py",
    } <= names


def measured(tmp_path, monkeypatch, arguments, made):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(emulation_runs, "default_dataset", lambda quick: tmp_path / "data")
    monkeypatch.setattr(samples, "generate", lambda config, folder: made.append(folder.name))
    return measure_experiment(
        "made_up",
        arguments,
        description="",
        plan=lambda seed: [
            Run(scheme="none", seed=seed),
            Run(scheme="mfu", seed=seed),
            Run(scheme="mfu", seed=seed, top_coverage=0.5),
        ],
        seeds=3,
    )


def test_an_experiment_has_one_row_a_run_seed_by_seed(tmp_path, emulated, workload, monkeypatch):
    made = []
    record = measured(tmp_path, monkeypatch, ["--quick"], made)
    assert [row["key"] for row in record.rows] == emulated
    assert [row["seed"] for row in record.rows] == [0, 0, 0, 1, 1, 1]
    stored = json.loads((tmp_path / "runs/quick/made_up.json").read_text())
    assert stored["seeds"] == [0, 1]
    assert stored["config"]["max_steps"] == emulation_runs.QUICK_STEPS
    assert made == ["data-top-0.5"]


def test_a_users_data_keeps_its_skew_and_the_papers_tables_and_replaces_no_default_result(
    tmp_path, emulated, workload, monkeypatch
):
    monkeypatch.setattr(emulation_runs, "OTHERS", tmp_path / "others")
    monkeypatch.setattr(emulation_runs, "KEPT", tmp_path / "kept")
    record = measured(tmp_path, monkeypatch, [str(tmp_path / "data"), "--seeds", "2"], [])
    assert [row["top_coverage"] for row in record.rows] == [None] * 4
    assert record.path == tmp_path / "others" / "made_up.json"
    assert json.loads(record.path.read_text())["config"]["covering"] == 0.995


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["day_0.gz"], "Make one with `python -m data"),
        (["nowhere"], "Make one with `python -m data"),
        (["--seeds", "1"], "at least 2"),
    ],
)
def test_wrong_arguments_are_refused_with_what_to_do(tmp_path, monkeypatch, capsys, arguments, message):
    (tmp_path / "day_0.gz").write_bytes(b"raw")
    with pytest.raises(SystemExit):
        measured(tmp_path, monkeypatch, arguments, [])
    assert message in capsys.readouterr().err


def test_figures_can_be_recomputed_without_code_or_data_of_the_stored_runs(
    tmp_path, emulated, workload, monkeypatch, capsys
):
    measured(tmp_path, monkeypatch, ["--quick"], []).finish({"figure": 1.0})
    emulated.clear()
    monkeypatch.setattr("experiments.harness.record._commit", lambda: "another")
    monkeypatch.setattr("experiments.harness.record.machine", lambda: {"processor": "another"})
    (tmp_path / "data" / "dataset.json").unlink()
    record = measured(tmp_path, monkeypatch, ["--quick", "--figures"], [])
    assert (emulated, len(record.rows)) == ([], 6)
    assert all(row["commit"] != "another" for row in record.rows), "each says what measured it"
    record.finish({"figure": 2.0})
    stored = json.loads(record.path.read_text())
    assert (stored["figures"], stored["commit"]) == ({"figure": 2.0}, "another")
    assert stored["machine"] != {"processor": "another"}, "nothing was measured here"
    record.path.unlink()
    with pytest.raises(SystemExit):
        measured(tmp_path, monkeypatch, ["--quick", "--figures"], [])
    assert "not there or not finished" in capsys.readouterr().err


ORPHANS = """
import os, sys, tempfile, time
from pathlib import Path
from experiments.emulation.runs import _processes

def work(folder):
    with tempfile.TemporaryDirectory(dir=folder):
        (Path(folder) / "pid").write_text(str(os.getpid()))
        time.sleep(100)

if __name__ == "__main__":
    with _processes(1) as pool:
        pool.submit(work, sys.argv[1]).result()
"""


@pytest.mark.system
@pytest.mark.timeout(120)
def test_processes_end_with_a_killed_parent_and_leave_nothing(tmp_path):
    script, pid_file = tmp_path / "orphans.py", tmp_path / "work" / "pid"
    script.write_text(ORPHANS)
    pid_file.parent.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script), str(pid_file.parent)], env=worker_environment(threads=1)
    )
    try:
        _wait_for(lambda: pid_file.exists() and pid_file.read_text())
    finally:
        parent.kill()
        parent.wait()
    worker = Path("/proc") / pid_file.read_text()
    _wait_for(lambda: not worker.exists())
    assert list(pid_file.parent.iterdir()) == [pid_file]


def _wait_for(condition):
    while not condition():
        time.sleep(0.1)
