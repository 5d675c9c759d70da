"""Killed, stopped and resumed runs end like an undisturbed one."""

import functools
import json
import re
import signal
import time

import psutil
import pytest

from cpr.faults import AtStep, KillWorker, Plan, Raise
from tests.programs import at_work
from tests.system import runs as system_runs
from tests.system.runs import curve, only_folder, report_of, wait_for_step

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

RESIDUALS = ("comm.exchange=all_gather", "comm.ratio=0.02", "comm.wire_dtype=fp16")
"""An exchange that leaves some on each rank, which must come back as well."""
AHEAD = ("train.pipeline=prefetch",)
"""The disturbed runs read batches ahead, and the undisturbed one does not: that must change nothing."""


@pytest.fixture(scope="module", autouse=True)
def undisturbed(start_for_all, dataset, tmp_path_factory):
    """A run that ends while the first test disturbs another; a function that waits for it, and its folder."""
    runs = tmp_path_factory.mktemp("undisturbed")
    process = start_for_all("-m", "dlrm.train", *settings(dataset, runs, *RESIDUALS), ranks=2, forks=True)

    def whole():
        _, said = process.communicate(timeout=150)
        assert process.returncode == 0, said
        return only_folder(runs)

    return functools.cache(whole)


def settings(dataset, runs, *more):
    """100 steps in one epoch."""
    often = ("train.evaluate_every_steps=25", "train.log_every_steps=5")
    common = ("data.global_batch_size=40", "data.window_batches=7", "schedule.warmup_steps=45")
    return system_runs.settings(dataset, runs, *common, *often, *more)


def workers_of(process):
    """The ranks that torchrun has started."""
    return [
        child for child in psutil.Process(at_work(process.pid)).children() if "dlrm.train" in child.cmdline()
    ]


def check_equal(folder, whole):
    """Metrics and report of a disturbed run equal those of the undisturbed one."""
    assert len(curve(whole)) == 24
    assert curve(folder) == curve(whole)
    assert report_of(folder)["metrics"] == report_of(whole)["metrics"]
    assert report_of(folder)["steps"] == report_of(whole)["steps"] == 100


def test_two_interruptions_in_one_epoch_change_nothing(start, dataset, memory, undisturbed, tmp_path):
    """Also if the last launch restarts workers, and thus recovers partially, and those before do not."""

    def train(*arguments, restarts=0):
        environment = {"CPR_RESIDENT_ROOT": str(memory)}
        return start(
            "-m", "dlrm.train", *arguments, ranks=2, restarts=restarts, forks=True, environment=environment
        )

    run = train(*settings(dataset, tmp_path, *RESIDUALS, *AHEAD, "checkpoint.every_steps=10"))
    folder = wait_for_step(run, tmp_path, 40)
    workers_of(run)[1].kill()
    _, said = run.communicate(timeout=60)
    assert run.returncode != 0, said

    run = train("--resume", folder)
    wait_for_step(run, tmp_path, 60)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert "resuming from save" in said
    saved_at = int(re.search(r"saved at step (\d+) before leaving", said)[1])
    assert saved_at >= 60

    run = train("--resume", folder, restarts=1)
    _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert f"begins at step {saved_at} (resume): the run resumes from the newest checkpoint" in said
    check_equal(folder, undisturbed())


def test_workers_that_die_between_steps_change_nothing(start, dataset, memory, undisturbed, tmp_path):
    deaths = (
        AtStep(step=29, kind=KillWorker(), target=1),
        AtStep(step=52, kind=Raise(), target=1),
        AtStep(step=75, kind=KillWorker(), target=0),  # an evaluation follows
    )
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps(Plan(schedules=deaths).to_json()))
    run = start(
        "-m",
        "dlrm.train",
        *settings(dataset, tmp_path, *RESIDUALS, *AHEAD, "checkpoint.every_steps=10"),
        ranks=2,
        restarts=3,
        forks=True,
        environment={"CPR_FAULTS": str(plan), "CPR_RESIDENT_ROOT": str(memory)},
    )
    _, said = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert said.count("the memory of all workers survived") == 3
    folder = only_folder(tmp_path)
    check_equal(folder, undisturbed())
    failures = report_of(folder)["failures"]
    assert failures["pls"] == 0
    assert [(each["kind"], each["step"], each["interrupted"]) for each in failures["recoveries"]] == [
        ("process", 29, False),
        ("process", 52, False),
        ("process", 75, False),
    ]
    assert "InjectedError" in " ".join(dead["why"] for dead in failures["recoveries"][1]["dead"])


def test_a_warm_start_is_repeated_until_a_save(start, dataset, memory, tmp_path):
    """Memory is lost at step 7, before the first save; a worker dies at step 22, after it."""

    def end(run):
        _, said = run.communicate(timeout=100)
        assert run.returncode == 0, said
        return said

    first = ("checkpoint.every_steps=20", "train.max_steps=20", "data.train_days=[0]")
    end(start("-m", "dlrm.train", *settings(dataset, tmp_path / "first", *first), forks=True))

    def train(name, **options):
        changes = ("data.train_days=[1]", "train.max_steps=40", "checkpoint.every_steps=15")
        return start(
            "-m",
            "dlrm.train",
            "--warm-start",
            only_folder(tmp_path / "first"),
            "--set",
            f"train.run_folder={tmp_path / name}",
            *changes,
            ranks=2,
            forks=True,
            **options,
        )

    deaths = (
        AtStep(step=7, kind=KillWorker(wipe=True), target=0),
        AtStep(step=7, kind=KillWorker(wipe=True), target=1),
        AtStep(step=22, kind=KillWorker(), target=1),
    )
    plan = tmp_path / "faults.json"
    plan.write_text(json.dumps(Plan(schedules=deaths).to_json()))
    whole = train("whole")
    run = train("run", restarts=3, environment={"CPR_FAULTS": str(plan), "CPR_RESIDENT_ROOT": str(memory)})
    assert end(whole).count("continue from save 0, step 20, of") == 1
    said = end(run)
    assert said.count("continue from save 0, step 20, of") == 2
    assert "the data starts over, with day 1 of" in said
    assert "the memory of all workers survived" in said
    assert curve(only_folder(tmp_path / "run")) == curve(only_folder(tmp_path / "whole"))


def test_a_diverged_run_is_not_resumed_by_torchrun(start, dataset, memory, tmp_path):
    run = start(
        "-m",
        "dlrm.train",
        *settings(dataset, tmp_path, *AHEAD, "checkpoint.every_steps=1", "dense.learning_rate=1e30"),
        "train.precision=fp32",
        ranks=2,
        restarts=1,
        forks=True,
        environment={"CPR_RESIDENT_ROOT": str(memory)},
    )
    _, said = run.communicate(timeout=100)
    assert run.returncode != 0
    first, second = [line for line in said.splitlines() if line.startswith("dlrm.train: ")]
    assert re.match(r"dlrm.train: (the loss|gradients|parameter) .*Lower dense.learning_rate", first)
    advice = r"(resume from save \d+, step \d+|begin a new run)"  # how far the only save came
    assert re.match(rf"dlrm.train: the run has stopped for good: .* mend the cause, and {advice}$", second)
    assert curve(only_folder(tmp_path)) == []  # the first line comes after 5 steps
    while any(memory.iterdir()):  # the janitor frees it when torchrun has ended
        time.sleep(0.1)
