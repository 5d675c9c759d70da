"""A run that is killed, resumed, stopped and resumed again ends exactly as one that nobody disturbed."""

import json
import re
import signal
import time

import psutil
import pytest

from data.synthetic import SyntheticConfig, generate

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]

CLOCKS = {"seconds", "samples_per_s"}


@pytest.fixture
def train(start, tmp_path):
    """Starts or resumes `-m dlrm.train` on two ranks: 200 steps in one epoch."""
    generate(
        SyntheticConfig(scale=1e-4, days=3, rows_per_day=2000, rows_per_block=500, rows_per_file=1000),
        tmp_path / "dataset",
    )

    def work(*arguments):
        return start("-m", "dlrm.train", *arguments, ranks=2)

    return work


def settings(tmp_path, runs, *more):
    return (
        "--recipe",
        "tiny",
        "--set",
        f"data.uri={tmp_path / 'dataset'}",
        f"train.run_folder={tmp_path / runs}",
        "data.global_batch_size=20",
        "data.window_batches=7",
        "train.evaluate_every_steps=50",
        "train.log_every_steps=10",
        "schedule.warmup_steps=90",
        *more,
    )


def wait_for_step(process, folder, step):
    """Wait until the run has logged `step`; gives its run folder."""
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        for path in folder.glob("*/metrics.jsonl"):
            if f'"train", "step": {step}' in path.read_text():
                return path.parent
        time.sleep(0.02)
    pytest.fail(f"step {step} did not come")


def workers_of(process):
    """The ranks that torchrun has started."""
    return [child for child in psutil.Process(process.pid).children() if "dlrm.train" in child.cmdline()]


def curve(folder):
    """All that the run has measured, clocks left out."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCKS} for line in lines]


def test_wish_9_two_interruptions_in_one_epoch_change_nothing(train, tmp_path):
    undisturbed = train(*settings(tmp_path, "whole"))
    run = train(*settings(tmp_path, "cut", "checkpoint.every_steps=20"))
    folder = wait_for_step(run, tmp_path / "cut", 60)
    workers_of(run)[1].kill()
    _, said = run.communicate(timeout=60)
    assert run.returncode != 0, said

    run = train("--resume", folder)
    wait_for_step(run, tmp_path / "cut", 120)
    run.send_signal(signal.SIGTERM)
    _, said = run.communicate(timeout=60)
    assert "going on from save" in said
    saved_at = int(re.search(r"saved at step (\d+) before leaving", said)[1])
    assert saved_at >= 120

    run = train("--resume", folder)
    _, said = run.communicate(timeout=100)
    assert run.returncode == 0, said
    assert f"step {saved_at} of" in said

    undisturbed.communicate(timeout=100)
    (whole,) = (tmp_path / "whole").iterdir()
    assert len(curve(whole)) == 24
    assert curve(folder) == curve(whole)
    reports = [json.loads((each / "report.json").read_text()) for each in (folder, whole)]
    assert reports[0]["metrics"] == reports[1]["metrics"]
    assert reports[0]["steps"] == 200
