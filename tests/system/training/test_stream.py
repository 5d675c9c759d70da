"""Training on files that arrive, through a killed worker, a stop, and another number of ranks."""

import json
import os
import shutil
import signal
import time

import polars as pl
import pytest

from experiments.label_skew import name_for
from tests.data.stream.kafka_cluster import KafkaCluster
from tests.system.runs import curve, only_folder, report_of, settings, wait_for
from tests.system.training.test_resume import workers_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

OPTIONS = (
    "train.precision=fp32",
    "train.log_every_steps=1",
    "train.progressive_steps=10",
    "checkpoint.every_steps=10",
    "stream.rows=encoded",
    "stream.wait_s=0.2",
)
FILE_ROWS = 500


class Arriving:
    """Rows of a data set, which arrive in pieces."""

    def __init__(self, dataset):
        self.num_rows = 0
        self._rows = pl.read_parquet(f"{dataset}/day=*/*.parquet")

    def add(self, count):
        for _ in range(count):
            first = self.num_rows % (self._rows.height - FILE_ROWS)
            self.write(self._rows[first : first + FILE_ROWS])
            self.num_rows += FILE_ROWS


class Folder(Arriving):
    """Files in a folder."""

    def __init__(self, dataset, folder):
        super().__init__(dataset)
        self.uri = folder
        folder.mkdir()

    def write(self, rows):
        part = self.uri / f"{self.num_rows}.tmp"
        rows.write_parquet(part, row_group_size=100)
        shutil.move(part, part.with_suffix(".parquet"))


class Topic(Arriving):
    """Messages of a topic with three partitions."""

    def __init__(self, dataset, cluster):
        super().__init__(dataset)
        cluster.create("clicks", 3)
        self.uri, self._cluster = cluster.uri("clicks"), cluster

    def write(self, rows):
        messages = rows.write_ndjson().encode().splitlines()
        for partition in range(3):
            self._cluster.produce("clicks", partition, messages[partition::3])


@pytest.fixture
def folder(dataset, tmp_path):
    return Folder(dataset, tmp_path / "in")


@pytest.fixture
def topic(dataset):
    cluster = KafkaCluster()
    yield Topic(dataset, cluster)
    cluster.close()


def lines(runs, kind):
    paths = list(runs.glob("*/metrics.jsonl"))
    written = [line for path in paths for line in path.read_text().splitlines(keepends=True)]
    found = [json.loads(line) for line in written if line.endswith("\n")]  # one may be half written
    return [line for line in found if line["kind"] == kind]


def trained(runs):
    return max((line["trained"] for line in lines(runs, "stream")), default=0)


@pytest.mark.parametrize("kind", ["folder", "topic"])
def test_each_record_is_trained_once(start, dataset, memory, tmp_path, request, kind):
    arriving, runs = request.getfixturevalue(kind), tmp_path / "runs"
    environment = {"CPR_RESIDENT_ROOT": str(memory)}

    def train(*arguments, ranks=2):
        program = ("-m", "dlrm.train", *arguments)
        return start(*program, ranks=ranks, restarts=3, environment=environment, forks=True)

    arriving.add(2)
    run = train(*settings(dataset, runs, *OPTIONS, f"stream.uri={arriving.uri}"))
    wait_for(lambda: trained(runs) == arriving.num_rows, run)
    arriving.add(4)
    wait_for(lambda: trained(runs) > 1200, run)
    workers_of(run)[1].kill()
    arriving.add(2)
    wait_for(lambda: trained(runs) == arriving.num_rows, run)
    folder = only_folder(runs)
    run.send_signal(signal.SIGTERM)  # while it waits for records
    _, said = run.communicate(timeout=60)
    assert "before leaving" in said, said
    arriving.add(3)
    run = train("--resume", folder, "--set", "stream.end_after_s=4", ranks=1)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    last = lines(runs, "stream")[-1]
    assert (last["trained"], last["left_out"], last["bad"]) == (arriving.num_rows, 0, 0)
    report = report_of(folder)
    assert report["samples"] == arriving.num_rows
    assert report["failures"]["recoveries"][0]["kind"] == "process"
    assert report["metrics"]["auc"] > 0.55
    windows = lines(runs, "progressive")
    steps = report["steps"]
    assert [window["step"] for window in windows] == [*range(10, steps, 10), steps]
    windows = [window for window in windows if window["auc"] is not None]  # the last may be of few samples
    assert sum(window["auc"] for window in windows[-5:]) > sum(window["auc"] for window in windows[:5])


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_files_that_are_away_while_workers_start_are_waited_for(start, dataset, memory, tmp_path, ending):
    """A part of the folder, of which they see nothing, is away for longer than a stream waits to end."""
    folder, runs, away = tmp_path / "in", tmp_path / "runs", tmp_path / "away"
    folder.mkdir()
    part = Folder(dataset, folder / "part")
    part.add(10)
    options = settings(dataset, runs, *OPTIONS, f"stream.uri={folder}", "stream.end_after_s=2")
    environment = {"CPR_RESIDENT_ROOT": str(memory)}
    run = start("-m", "dlrm.train", *options, ranks=2, restarts=1, environment=environment, forks=True)
    wait_for(lambda: trained(runs) > 500, run)
    part.uri.rename(away)
    other = Folder(dataset, folder / "other")
    other.add(1)
    if ending == signal.SIGKILL:
        workers_of(run)[1].kill()
    else:
        run.send_signal(ending)
        run.communicate(timeout=60)
        run = start("-m", "dlrm.train", "--resume", only_folder(runs), ranks=2, forks=True)
    at_least = time.monotonic() + 15
    wait_for(lambda: time.monotonic() > at_least, run)  # fails if the run ends
    away.rename(part.uri)
    _, said = run.communicate(timeout=120)
    assert run.returncode == 0, said
    last = lines(runs, "stream")[-1]
    assert (last["trained"], last["left_out"], last["bad"]) == (part.num_rows + other.num_rows, 0, 0)
    assert "is not there now: waiting for it" in said


def test_one_rank_learns_from_a_stream_what_it_learns_from_the_same_files(start, dataset, tmp_path):
    """Bit for bit: records, their order, weights and types are those of the loader of files."""
    arrived = tmp_path / "in"
    arrived.mkdir()
    for number, part in enumerate(sorted(dataset.glob("day=[01]/*.parquet"))):
        copy = arrived / f"{number}.parquet"
        shutil.copyfile(part, copy)
        os.utime(copy, (1e9 + number, 1e9 + number))
    kinds = {
        "files": ("data.shuffle=false", "data.train_days=[0,1]"),
        "stream": (f"stream.uri={arrived}", "stream.rows=encoded", "stream.end_after_s=1"),
    }
    runs = {
        name: start(
            "-m", "dlrm.train", *settings(dataset, tmp_path / name, "train.precision=fp32", *more), forks=True
        )
        for name, more in kinds.items()
    }
    for run in runs.values():
        _, said = run.communicate(timeout=120)
        assert run.returncode == 0, said
    files, stream = (only_folder(tmp_path / name) for name in kinds)
    assert len(curve(files)) >= 20
    assert curve(stream) == curve(files)
    assert report_of(stream)["metrics"] == report_of(files)["metrics"]


def test_ranks_that_have_one_label_each_learn_what_one_rank_learns_from_the_same_batches(
    start, dataset, tmp_path
):
    """Batches of 5 and 13 samples, in proportion to what waits, so that each sample has the same weight."""
    rows = pl.read_parquet(sorted(dataset.glob("day=[01]/*.parquet")))
    clicks, others = (rows.filter(pl.col("label") == label) for label in (1, 0))
    batches = [part for at in range(12) for part in (clicks[5 * at :][:5], others[13 * at :][:13])]
    files = {
        "one/0": pl.concat(batches),
        f"two/{name_for(0, 0)}": clicks[:900],
        f"two/{name_for(1, 0)}": others[:2700],
    }
    runs = {}
    for number, name in enumerate(("one", "two"), start=1):
        folder = tmp_path / name
        folder.mkdir()
        for path in (path for path in files if path.startswith(name)):
            written = (tmp_path / path).with_suffix(".parquet")
            files[path].write_parquet(written)
            os.utime(written, (1e9, 1e9))
        options = ("data.global_batch_size=18", "train.max_steps=12", "train.log_every_steps=1")
        stream = (f"stream.uri={folder}", "stream.rows=encoded")
        more = settings(dataset, tmp_path / f"runs-{name}", "train.precision=fp32", *options, *stream)
        runs[name] = start("-m", "dlrm.train", *more, ranks=number, forks=True)
    for run in runs.values():
        _, said = run.communicate(timeout=120)
        assert run.returncode == 0, said
    one, two = (only_folder(tmp_path / f"runs-{name}") for name in runs)
    losses = [[line["loss"] for line in curve(folder) if line["kind"] == "train"] for folder in (one, two)]
    assert len(losses[0]) == 12
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    metrics = report_of(one)["metrics"]
    assert report_of(two)["metrics"]["log_loss"] == pytest.approx(metrics["log_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("train.epochs=2",), "train.epochs=2 are passes over data"),
        (("data.train_days=[0]",), "data.train_days"),
        (("train.batching=dynamic",), "train.batching=dynamic sizes batches by speed"),
        (("train.measure_scaling=true",), "train.measure_scaling=True times steps that wait for no data"),
        (("train.pipeline=waves",), "train.pipeline=waves is made for batches of one size"),
        (("comm.exchange=selsync",), "comm.exchange=selsync averages parameters"),
        (("recovery.max_pls=0.5",), "recovery.max_pls is a portion"),
    ],
)
def test_what_streams_cannot_be_combined_with(more, said):
    from dlrm.config.recipe import load_config  # noqa: PLC0415

    with pytest.raises(ValueError, match=said):
        load_config("tiny", ["stream.uri=/in", *more])
    with pytest.raises(ValueError, match=r"stream\.wait_s: about data that streams in; set stream\.uri"):
        load_config("tiny", ["stream.wait_s=3"])
    with pytest.raises(ValueError, match=r"set that, too"):
        load_config("tiny", ["stream.uri=/in", "stream.keep=oldest"])
    with pytest.raises(ValueError, match=r"stream\.inject is a share of records, from 0 to 1, not 1\.5"):
        load_config("tiny", ["stream.uri=/in", "stream.inject=1.5"])
    with pytest.raises(ValueError, match=r"stream\.backlog must be at least 0"):
        load_config("tiny", ["stream.uri=/in", "stream.backlog=-1"])
