"""The command `dlrm.train`: whole runs, signals, mistakes."""

import json
import os
import re
import shutil
import signal
import stat
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.datasets import NUM_FEATURES
from tests.programs import at_work

pytestmark = [pytest.mark.system, pytest.mark.timeout(120)]

REPO = Path(__file__).parents[3]
ROWS_PER_DAY = 2000
PLAN_LINES = NUM_FEATURES + 3
"""A line for each table between two of headings and one of totals."""
ENDS_WITHIN_S = 20
"""Far more than the few seconds it takes, for slow machines; torchrun would kill after 30."""


@pytest.fixture
def own_dataset(dataset, tmp_path):
    """A copy that a test may spoil."""
    return shutil.copytree(dataset, tmp_path / "dataset")


@pytest.fixture
def train(start, dataset, tmp_path):
    """Starts `-m dlrm.train` with the recipe tiny on a small data set."""

    def work(*overrides, ranks=0, uri=dataset, forks=False):
        settings = (f"data.uri={uri}", "data.global_batch_size=200", f"train.run_folder={tmp_path / 'runs'}")
        command = ("-m", "dlrm.train", "--recipe", "tiny", "--set", *settings, *overrides)
        return start(*command, ranks=ranks, forks=forks)

    return work


def said_by_us(stderr):
    """The lines of standard error that are not torchrun's own report of a failed worker."""
    return [
        line
        for line in stderr.split("Traceback (most recent call last):")[0].splitlines()
        if not re.match(r"[EW]\d{4} .*torch/distributed/", line)
    ]


def wait_for(process, path, pattern):
    """Wait until a file of the run folder holds `pattern`."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        if any(re.search(pattern, each.read_text()) for each in path.glob("runs/*/metrics.jsonl")):
            return
        time.sleep(0.05)
    pytest.fail(f"no {pattern} in time")


def wait_until_idle(process):
    """Wait until a process that has worked does nothing any more for a second."""
    before = -1.0
    while (now := psutil.Process(process.pid).cpu_times().user) < 0.5 or now != before:
        assert process.poll() is None, process.communicate()
        before = now
        time.sleep(1)


def interrupt(process, signum):
    """Send a signal to the started process alone, as a shell or a scheduler does; all must end."""
    family = psutil.Process(at_work(process.pid)).children(recursive=True)
    process.send_signal(signum)
    _, left = psutil.wait_procs(family, timeout=ENDS_WITHIN_S)
    assert not left
    stdout, stderr = process.communicate(timeout=ENDS_WITHIN_S)
    assert f'File "{REPO}/dlrm' not in stderr, "no traceback of ours"
    assert f'File "{REPO}/data' not in stderr, "no traceback of ours"
    assert process.returncode != 0
    return stdout, stderr


def test_a_whole_run(train, tmp_path):
    before = os.umask(0o027)
    try:
        # fp32: with bf16, a run on a processor without AVX-512 begins with a warning; slow: few samples
        # would teach predictions that are too sure, another warning
        slow = ("train.precision=fp32", "dense.learning_rate=0.005")
        process = train(*slow, "train.evaluate_every_steps=10", "train.log_every_steps=5", ranks=2)
    finally:
        os.umask(before)
    stdout, stderr = process.communicate()
    (folder,) = (tmp_path / "runs").iterdir()
    table = dict(re.split(r"  +", line, maxsplit=1) for line in stdout.strip().splitlines())
    assert list(table) == [
        "AUC",
        "log loss",
        "normalized entropy",
        "calibration",
        "best AUC any model can reach",
        "training samples/s",
        "steps",
        "training samples",
        "time",
        "exchange of dense gradients",
        "run folder",
    ]
    assert re.fullmatch(r"ring fp32: [\d.]+ ms, [\d.]+% of a step; 0\.08 MB a rank", list(table.values())[9])
    assert 0 < float(table["AUC"]) < 1
    assert table["steps"] == "20"
    assert table["training samples"] == "4,000"
    assert table["run folder"] == str(folder)
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "versions.json", "metrics.jsonl", "report.json", "report.txt"}
    assert any(name.startswith("events.out.tfevents") for name in names)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert modes == {path: 0o750 if path.is_dir() else 0o640 for path in modes}  # as the umask says
    assert json.loads((folder / "config.json").read_text())["data"]["global_batch_size"] == 200
    assert json.loads((folder / "report.json").read_text())["metrics"]["num_samples"] == ROWS_PER_DAY
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == [5, 10, 15, 20]
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [10, 20]
    assert all(line["evaluated_samples"] == ROWS_PER_DAY for line in lines if line["kind"] == "evaluation")
    # nothing is said that is not meant: the plan, then progress, then evaluations
    said = said_by_us(stderr)
    assert said[0] == "tables:"
    assert said[PLAN_LINES - 1].startswith(f"{NUM_FEATURES} tables, ")
    assert all(
        re.match(r"evaluation after |[\d,]+ of [\d,]+ samples ", line) for line in said[PLAN_LINES:]
    ), said[PLAN_LINES:]


@pytest.mark.parametrize(("ranks", "restarts"), [(0, 0), (2, 1)], ids=["alone", "recovery"])
def test_no_thread_of_a_process_group_is_left_after_the_training(start, dataset, tmp_path, ranks, restarts):
    """One that lets go of a tensor while the interpreter ends would abort a process that has finished."""
    settings = (f"data.uri={dataset}", "data.global_batch_size=200", f"train.run_folder={tmp_path / 'runs'}")
    command = ("-m", "tests.system.training.threads_left", "--recipe", "tiny", "--set", *settings)
    process = start(*command, "checkpoint.every_steps=5", ranks=ranks, restarts=restarts)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert stdout.count("left: []") == max(ranks, 1), stdout


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "torchrun"])
def test_ctrl_c_while_training(train, tmp_path, ranks):
    """Of a process that was started as a user starts it, and of workers that are forks."""
    process = train("train.epochs=100000", "train.log_every_steps=5", ranks=ranks, forks=ranks > 0)
    wait_for(process, tmp_path, '"step": 10,')
    _, stderr = interrupt(process, signal.SIGINT)
    assert stderr.count("dlrm.train: stopped by SIGINT") == 1
    if not ranks:
        assert process.returncode == 128 + signal.SIGINT


def test_sigterm_while_evaluating_saves_before_leaving(train, tmp_path):
    """Each step of 10 samples is followed by an evaluation of 200 steps: that is where the signal comes."""
    process = train(
        "train.epochs=100000",
        "train.evaluate_every_steps=1",
        "data.global_batch_size=10",
        "checkpoint.every_steps=100000",
        ranks=2,
        forks=True,
    )
    wait_for(process, tmp_path, '"kind": "evaluation", "step": 2,')
    _, stderr = interrupt(process, signal.SIGTERM)
    assert stderr.count("dlrm.train: stopped by SIGTERM") == 1
    assert len(re.findall(r"saved at step [3-9]\d* before leaving", stderr)) == 1


def block(dataset, part):
    """Let a file of the data set hang whoever opens it."""
    path = dataset / json.loads((dataset / "dataset.json").read_text())["parts"][part]["path"]
    path.unlink()
    os.mkfifo(path)


def test_ctrl_c_while_loading_from_storage_that_hangs(train, own_dataset, tmp_path):
    block(own_dataset, part=1)
    options = ("data.window_batches=1", "train.log_every_steps=1", "data.shuffle=false")
    process = train(*options, ranks=2, uri=own_dataset, forks=True)
    # the first file has 1000 samples, 5 steps, and a step needs the next batch's ids
    wait_for(process, tmp_path, '"step": 4,')
    _, stderr = interrupt(process, signal.SIGINT)
    assert stderr.count("stopped by SIGINT") == 1


def test_sigterm_while_the_storage_hangs_from_the_start(train, own_dataset):
    """The main thread is in native code, where Python runs no signal handler."""
    block(own_dataset, part=0)
    process = train(uri=own_dataset)
    wait_until_idle(process)
    _, stderr = interrupt(process, signal.SIGTERM)
    assert stderr == "stopped by SIGTERM, by force: a call did not return\n"
    assert process.returncode == 128 + signal.SIGTERM


def spoil(dataset, part, change):
    """Rewrite a file with `change` of its table, and the manifest to fit the new file."""
    manifest = json.loads((dataset / "dataset.json").read_text())
    entry = manifest["parts"][part]
    path = dataset / entry["path"]
    pq.write_table(
        change(pq.read_table(path, partitioning=None)), path, row_group_size=entry["row_groups"][0]
    )
    entry["num_bytes"] = path.stat().st_size
    (dataset / "dataset.json").write_text(json.dumps(manifest))


def with_id(table, name, row, value):
    ids = table[name].to_pylist()
    ids[row] = value
    return table.set_column(table.schema.get_field_index(name), name, pa.array(ids, pa.int32()))


@pytest.mark.parametrize(
    ("overrides", "code", "message"),
    [
        (["train.epoch=2"], 2, "unknown configuration key train.epoch; did you mean train.epochs?"),
        (["data.uri=nowhere"], 2, "data.uri: nowhere holds no dataset.json"),
        (
            ["dense.learning_rate=1e30", "train.precision=fp32"],
            1,
            r"the loss is (nan|inf) at step \d+ \(epoch 0, batch \d+ of it, rank 0\)",
        ),
    ],
    ids=["unknown_key", "no_dataset", "diverges"],
)
def test_a_mistake_is_one_line(train, overrides, code, message):
    process = train(*overrides, forks=True)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stdout == ""
    plan = [line for line in said_by_us(stderr) if not line.startswith("dlrm.train: ")]
    assert plan == [] or (plan[0] == "tables:" and len(plan) == PLAN_LINES)
    (line,) = [line for line in stderr.splitlines() if line.startswith("dlrm.train: ")]
    assert re.match(
        f"dlrm.train: {message.replace('?', '.')}" if code == 2 else f"dlrm.train: {message}", line
    )
    assert "Traceback" not in stderr


def test_a_mistake_of_all_ranks_is_reported_once(train):
    process = train("data.global_batch_size=201", ranks=2, forks=True)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1  # torchrun's
    assert said_by_us(stderr) == [
        "dlrm.train: data.global_batch_size 201 cannot be divided among 2 ranks; choose a multiple of 2"
    ]


def test_a_mistake_of_one_rank_is_reported(train, own_dataset):
    """Rank 1 meets an id outside its table, in the middle of training; rank 0 hears a connection break."""
    spoil(own_dataset, part=1, change=lambda table: with_id(table, "cat_8", row=-1, value=77))
    process = train("data.shuffle=false", "data.window_batches=1", ranks=2, uri=own_dataset, forks=True)
    _, stderr = process.communicate(timeout=60)
    line, *later = [line for line in said_by_us(stderr) if line.startswith("dlrm.train: ")]
    assert "column cat_8 holds id 77, but its table has 3 rows" in line
    # torchrun's signal may reach rank 0 before it hears that the connection broke
    assert later in ([], ["dlrm.train: stopped by SIGTERM"])
    assert f'File "{REPO}/dlrm' not in stderr
