"""The examples of own models learn, also when a worker is killed, and a resumed run has the same bits."""

import json

import pytest

from cpr.faults import AtStep, KillWorker, Plan
from dlrm.inference.program.exporting import ExportJob, export
from tests.readmes import command, run
from tests.system.runs import curve, only_folder, report_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture
def train(start_for_all, memory, tmp_path):
    """Starts an example on two ranks in a folder of its own; rank 1 dies after step `dies_at`, if given."""

    def work(name, recipe, data, dies_at=0, more=()):
        resident, faults = memory / name, tmp_path / f"{name}.json"
        resident.mkdir()
        plan = Plan(schedules=(AtStep(step=dies_at, kind=KillWorker(), target=1),))
        faults.write_text(json.dumps(plan.to_json()))
        environment = {"CPR_RESIDENT_ROOT": str(resident)} | ({"CPR_FAULTS": str(faults)} if dies_at else {})
        return start_for_all(
            *("-m", "dlrm.train", "--recipe", recipe, "--set", f"data.uri={data}"),
            *(f"train.run_folder={tmp_path / name}", "checkpoint.every_steps=50", *more),
            ranks=2,
            restarts=2,
            forks=True,
            environment=environment,
        )

    return work


def end(process):
    _, said = process.communicate(timeout=150)
    assert process.returncode == 0, said
    return said


def check_recall(folder):
    metrics = report_of(folder)["metrics"]
    means = metrics["means"]
    assert means["recall@10"]["value"] > 3 * means["chance@10"]["value"] > 0
    assert metrics["auc"] is None


def check_death(folder, step):
    deaths = [(each["step"], each["kind"]) for each in report_of(folder)["failures"]["recoveries"]]
    assert deaths == [(step, "process")]


def test_both_examples_learn_though_a_worker_is_killed(start, train, tmp_path, monkeypatch):
    """The sequence model has dropout; it is killed, stopped and resumed, and equals an undisturbed run."""
    monkeypatch.chdir(tmp_path)
    run(command("examples/README.md", "-m examples.two_tower"))
    run(command("examples/README.md", "-m examples.sequence"))
    clicks, visits = (tmp_path / "datasets" / name for name in ("two_tower", "sequence"))
    short = ("train.evaluate_every_steps=0", "train.log_every_steps=20")
    recipe = "examples/sequence.toml"
    killed = train("killed", recipe, visits, 30, (*short, "train.max_steps=60"))
    towers = train("towers", "examples/two_tower.toml", clicks, 70, (*short, "train.max_steps=160"))
    end(killed)
    folder = only_folder(tmp_path / "killed")
    check_death(folder, step=30)
    whole = train("whole", recipe, visits, more=(*short, "train.max_steps=120"))
    options = ("--resume", folder, "--set", "train.max_steps=120")
    end(start("-m", "dlrm.train", *options, ranks=2, forks=True))
    end(towers)
    check_death(only_folder(tmp_path / "towers"), step=70)
    check_recall(only_folder(tmp_path / "towers"))
    for trained in (folder, only_folder(tmp_path / "towers")):
        export(ExportJob(run=trained, out=tmp_path / f"{trained.name}.pt2"))
    end(whole)
    check_recall(folder)
    undisturbed = curve(only_folder(tmp_path / "whole"))
    assert [line for line in curve(folder) if line["step"] != 60 or line["kind"] == "train"] == undisturbed


OWN = """
[model]
kind = "tests.dlrm.models.own:TwoTables"
[tables]
optimizer = "sgd"
[dense]
optimizer = "sgd"
[sharding]
data_parallel_rows = 10
[train]
precision = "fp32"
log_every_steps = 1
max_steps = 40
"""


def test_two_ranks_train_a_class_of_the_user_as_one_does(start, dataset, tmp_path):
    """Tables of two widths, one shared with mean pooling; windows of one batch have the same samples."""
    recipe = tmp_path / "own.toml"
    recipe.write_text(OWN)
    data = (f"data.uri={dataset}", "data.global_batch_size=50", "data.window_batches=1", "data.shuffle=false")
    options = ("-m", "dlrm.train", "--recipe", recipe, "--set", *data)
    runs = {
        ranks: start(*options, f"train.run_folder={tmp_path / str(ranks)}", ranks=ranks, forks=True)
        for ranks in (0, 2)
    }
    for process in runs.values():
        end(process)
    one, two = (curve(only_folder(tmp_path / str(ranks))) for ranks in runs)
    assert len(one) == len(two) == 41
    assert two[-1]["metrics"] == pytest.approx(one[-1]["metrics"], rel=1e-6)
