"""Run folder, metrics, report and progress of a run."""

import io
import json
import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from cpr.estimator.history import SaveCost, SaveEvent
from cpr.estimator.renting.noise import GradientNoise
from cpr.estimator.renting.trial import Trial
from cpr.mirror.config import MirrorFigures
from cpr.recovery.run.report import Recovery
from data.dataset import DatasetManifest, Feature, Part
from dlrm.comm.feedback import LostResiduals
from dlrm.comm.links import Link
from dlrm.comm.stats import ExchangeFigures
from dlrm.metrics import ClickMetrics, MetricValues
from dlrm.telemetry import Recorder, Telemetry, make_run_folder, open_telemetry, progress, recorder
from dlrm.telemetry.folder import trained_manifest
from dlrm.telemetry.progress import TrainingProgress
from dlrm.telemetry.scaling import ScalingFigures

CPU = torch.device("cpu")
BATCH = 100
DATA = DatasetManifest(
    features=(Feature(name="user", rows=9, weights="w"),),
    parts=(Part(path="a.parquet", day=0, num_rows=1, row_groups=(1,), num_bytes=1, sha256=""),),
    label="click",
    schema={"label": {"column": "click"}},
)
CONFIG = {"train": {"epochs": 2, "device": "cpu"}, "model": {"top_mlp": (64, 1)}, "data": {"shuffle": True}}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_run(folder: Path, state: dict | None = None, begins: bool = True, **options: object) -> Telemetry:
    defaults = {
        "recipe": "tiny",
        "config": CONFIG,
        "data": DATA,
        "total_samples": 20 * BATCH,
        "device": CPU,
        "log_every_steps": 5,
        "stream": io.StringIO(),
    }
    telemetry = Telemetry(folder, **{**defaults, **options})
    if state is not None:
        telemetry.load_state_dict(state)
    if begins:
        telemetry.begin()
    return telemetry


def one_step(telemetry: Telemetry, step: int, samples: int, loss: float = 0.0, **batch: torch.Tensor) -> None:
    telemetry.step(
        step=step,
        samples=samples,
        loss=torch.tensor(loss),
        learning_rates={"tables": 0.1, "dense": 0.2},
        **{"logits": torch.zeros(2), "labels": torch.zeros(2), **batch},
    )


def train(telemetry: Telemetry, steps: int, good: bool = True) -> None:
    generator = torch.Generator().manual_seed(0)
    for step in range(1, steps + 1):
        labels = (torch.rand(BATCH, generator=generator) < 0.5).float()
        logits = labels if good else torch.rand(BATCH, generator=generator)
        one_step(telemetry, step, step * BATCH, float(step), logits=logits, labels=labels)


def evaluation() -> MetricValues:
    metrics = ClickMetrics(CPU)
    metrics.update(torch.tensor([1.0, -1.0, 0.5]), torch.tensor([1.0, 0.0, 0.0]))
    return metrics.compute()


def all_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def without_times(folder: Path) -> list[dict]:
    return [{name: value for name, value in line.items() if name != "time"} for line in all_lines(folder)]


def lines(folder: Path) -> list[dict]:
    return [line for line in without_times(folder) if line["kind"] not in {"hyperparameters", "end"}]


def lines_of(folder: Path, kind: str) -> list[dict]:
    return [line for line in without_times(folder) if line["kind"] == kind]


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Inside, no file grows beyond `limit` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_was_measured_of_scaling_is_a_line(tmp_path):
    """`cpr plan --workers` reads it together with the speeds."""
    telemetry = open_run(tmp_path)
    noise = GradientNoise(workers=2, batch=BATCH, steps=5, local=3.0, averaged=2.0)
    figures = ScalingFigures(workers=2, global_batch=BATCH, dense_bytes=400)
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    one_step(telemetry, 1, BATCH)
    telemetry.scaling(figures)
    telemetry.scaling(replace(figures, pooled_bytes=64.0, link=link, noise=noise))
    few, all_of_them = lines_of(tmp_path, "scaling")
    assert few == {
        "kind": "scaling",
        "step": 1,
        "workers": 2,
        "global_batch": BATCH,
        "dense_bytes": 400,
    }
    assert all_of_them["link_bytes_per_s"] == 1e9
    assert all_of_them["noise"] == {
        **{"steps": 5, "local": 3.0, "averaged": 2.0, "trace": BATCH, "squared_norm": 1.0},
        **{"scale": BATCH, "gamma": 0.75},
    }
    for step in range(2, 21):
        one_step(telemetry, step, step * BATCH)
    found = Trial.of("run", all_lines(tmp_path))
    assert (found.noise, found.pooled_bytes) == (noise, 64.0)
    telemetry.close()


def test_a_whole_run_writes_configuration_metrics_and_report(tmp_path):
    telemetry = open_run(tmp_path, best_auc=0.8)
    train(telemetry, 20)
    values = evaluation()
    telemetry.evaluation(step=20, samples=20 * BATCH, values=values)
    report = telemetry.finish()  # nothing is closed: metrics are written unbuffered

    assert json.loads((tmp_path / "config.json").read_text())["train"] == CONFIG["train"]
    assert trained_manifest(tmp_path) == replace(DATA, parts=())
    versions = json.loads((tmp_path / "versions.json").read_text())
    assert versions["torch_build"] == torch.__version__
    assert "torchrec" in versions["packages"]
    (start,) = lines_of(tmp_path, "hyperparameters")
    assert (start["train.epochs"], start["model.top_mlp"], start["data.shuffle"]) == (2, [64, 1], True)
    *training, evaluated = lines(tmp_path)
    assert [line["step"] for line in training] == [5, 10, 15, 20]
    assert [line["loss"] for line in training] == [3.0, 8.0, 13.0, 18.0]  # means over 1-5, 6-10, ...
    assert {line["auc"] for line in training} == {1.0}
    assert training[0]["learning_rates"] == {"tables": 0.1, "dense": 0.2}
    assert all(line["samples_per_s"] > 0 for line in training)
    assert (evaluated["kind"], evaluated["auc"], evaluated["evaluated_samples"]) == ("evaluation", 1.0, 3)
    assert evaluated["best_auc"] == 0.8
    assert all_lines(tmp_path)[-1]["reason"] == "finished"

    assert (report.steps, report.samples, report.metrics) == (20, 20 * BATCH, values)
    assert json.loads((tmp_path / "report.json").read_text())["metrics"]["auc"] == 1.0
    assert "0.8000" in (tmp_path / "report.txt").read_text()
    telemetry.close()


def test_a_missing_tensorboard_is_logged_once(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with caplog.at_level(logging.INFO, "dlrm"):
        telemetry = open_run(tmp_path)
        train(telemetry, 10)
        telemetry.close()
    assert [record.message for record in caplog.records if "tensorboard" in record.message] == [
        "tensorboard is not installed: no event files (metrics.jsonl has the same figures)"
    ]
    assert len(lines(tmp_path)) == 2


def test_lines_that_a_full_disk_refuses_are_written_later(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "event_writer", lambda: None)
    telemetry = open_run(tmp_path, log_every_steps=1)
    train(telemetry, 1)
    written = (tmp_path / "metrics.jsonl").stat().st_size
    with full_disk(written + 10), caplog.at_level(logging.WARNING, "dlrm"):
        train(telemetry, 3)
        assert (tmp_path / "metrics.jsonl").stat().st_size == written + 10
    (warning,) = (record.message for record in caplog.records)
    assert "metrics.jsonl cannot be written" in warning
    telemetry.evaluation(step=3, samples=3 * BATCH, values=evaluation())
    telemetry.close()
    assert [(line["kind"], line["step"]) for line in lines(tmp_path)] == [
        *(("train", step) for step in (1, 1, 2, 3)),
        ("evaluation", 3),
    ]


def test_lines_that_were_never_written_are_counted(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "event_writer", lambda: None)
    telemetry = open_run(tmp_path, log_every_steps=1)
    with full_disk(10), caplog.at_level(logging.WARNING, "dlrm"):
        train(telemetry, 2)
        telemetry.evaluation(step=2, samples=2 * BATCH, values=evaluation())
        report = telemetry.finish()
        telemetry.close()
    assert report.metrics.auc == 1.0
    written, reported, closed = (record.message for record in caplog.records)
    assert "metrics.jsonl cannot be written" in written
    assert "the report cannot be written" in reported
    assert closed == f"{tmp_path / 'metrics.jsonl'} lacks its last 4 lines"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the writer's thread
def test_event_files_that_cannot_be_written_cost_one_warning(tmp_path, caplog):
    telemetry = open_run(tmp_path, log_every_steps=1)
    with caplog.at_level(logging.WARNING, "dlrm"):
        with full_disk(600):  # for an event or two
            train(telemetry, 20)
        telemetry.close()
    assert len([record for record in caplog.records if "TensorBoard" in record.message]) == 1
    assert [line["step"] for line in lines(tmp_path)] == list(range(1, 21))


def test_event_files_that_cannot_be_begun_cost_one_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_: object, **__: object) -> None:
        raise OSError("full")

    monkeypatch.setattr(recorder, "event_writer", lambda: refuse)
    with caplog.at_level(logging.WARNING, "dlrm"):
        telemetry = open_run(tmp_path)
        train(telemetry, 10)
        telemetry.close()
    assert len([record for record in caplog.records if "TensorBoard" in record.message]) == 1
    assert len(lines(tmp_path)) == 2


def test_a_run_that_cannot_write_its_configuration_does_not_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "event_writer", lambda: None)
    with full_disk(10), pytest.raises(OSError, match=r"config\.json cannot be written .* train\.run_folder"):
        open_run(tmp_path)
    assert list(tmp_path.iterdir()) == []
    telemetry = open_run(tmp_path)
    train(telemetry, 10)
    state = {**telemetry.state_dict(), "steps": 5}
    telemetry.close()
    with full_disk(10), caplog.at_level(logging.WARNING, "dlrm"):
        open_run(tmp_path, state).close()
    assert [line["step"] for line in lines(tmp_path)] == [5]
    assert len([record for record in caplog.records if "stays as an earlier start" in record.message]) == 3
    assert not list(tmp_path.glob("*.tmp"))


def test_nan_becomes_null_in_metrics(tmp_path):
    telemetry = open_run(tmp_path, log_every_steps=1)
    one_step(telemetry, 1, 2, loss=torch.nan)
    telemetry.close()
    assert lines(tmp_path)[0]["loss"] is None
    assert lines(tmp_path)[0]["auc"] is None


def test_a_terminal_shows_a_bar_with_speed_loss_and_auc(tmp_path):
    terminal = Terminal()
    telemetry = open_run(tmp_path, stream=terminal)
    train(telemetry, 20)
    telemetry.close()
    last = terminal.getvalue().split("\r")[-1]
    for shown in ("100%", "2.00k/2.00k", "samples/s", "loss 18.0000", "AUC 1.0000"):
        assert shown in last


def test_without_a_terminal_progress_is_logged(tmp_path, caplog):
    stream = io.StringIO()
    with caplog.at_level(logging.INFO, "dlrm"):
        telemetry = open_run(tmp_path, stream=stream)
        train(telemetry, 20)
        telemetry.close()
    assert stream.getvalue() == ""
    (line,) = [record.message for record in caplog.records if "samples/s" in record.message]
    assert line.startswith("500 of 2,000 samples (25 %)")
    assert line.endswith("loss 3.0000, AUC 1.0000")


def test_the_last_steps_have_a_line_of_their_own(tmp_path):
    train(first := open_run(tmp_path), 7)
    first.log_rest()
    state = first.state_dict()
    first.close()
    resumed = open_run(tmp_path, state)
    resumed.log_rest()  # of no steps
    for step in (8, 9, 10):
        one_step(resumed, step, step * BATCH, float(step))
    resumed.log_rest()  # all have theirs
    resumed.close()
    found = [
        (line["step"], line["loss"], line["learning_rates"]["dense"]) for line in lines_of(tmp_path, "train")
    ]
    assert found == [(5, 3.0, 0.2), (7, 6.5, 0.2), (10, 9.0, 0.2)]


def test_the_time_of_an_evaluation_is_not_training_time(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(recorder, "monotonic", lambda: clock[0])
    telemetry = open_run(tmp_path, log_every_steps=1)
    for step in (1, 2):
        clock[0] += 2.0
        one_step(telemetry, step, step * 100)
        clock[0] += 50.0
        telemetry.evaluation(step=step, samples=step * 100, values=evaluation())
    report = telemetry.finish()
    telemetry.close()
    assert [line["samples_per_s"] for line in lines(tmp_path) if line["kind"] == "train"] == [50.0, 50.0]
    assert report.samples_per_s == 50.0
    assert report.seconds == 104.0


def test_the_folder_is_unchanged_before_begin(tmp_path):
    train(first := open_run(tmp_path), 10)
    first.close()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    state = {**Recorder().state_dict(), "steps": 5}
    second = open_run(tmp_path, state, begins=False, config={"model": {"kind": "fm"}})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    second.begin()
    second.close()
    assert json.loads((tmp_path / "config.json").read_text()) == {"model": {"kind": "fm"}}
    assert [line["step"] for line in lines(tmp_path)] == [5]
    assert not list(tmp_path.glob("*.tmp"))


def test_a_resumed_run_reports_the_speed_of_its_own_samples(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(recorder, "monotonic", lambda: clock[0])
    earlier = open_run(tmp_path, log_every_steps=1)
    train(earlier, 10)
    state = earlier.state_dict()
    earlier.close()
    telemetry = open_run(tmp_path, state, log_every_steps=1)
    clock[0] = 1.0
    one_step(telemetry, 11, state["samples"] + 100)
    assert telemetry.finish().samples_per_s == 100.0
    telemetry.close()


def test_a_model_at_chance_is_warned_of(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(recorder.ChanceWatch.__init__, "__defaults__", (1000,))
    monkeypatch.setattr(recorder.RunningAuc, "value", lambda self: 0.503)
    telemetry = open_run(tmp_path)
    train(telemetry, 20, good=False)
    telemetry.close()
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "no better than chance" in warning.message


def test_an_evaluation_worse_than_predicting_the_mean_is_warned_of_when_that_begins(tmp_path, caplog):
    telemetry = open_run(tmp_path)
    for step, sure in enumerate((0.5, 9.0, 9.0, 0.5, 9.0)):
        metrics = ClickMetrics(CPU)
        metrics.update(sure * torch.tensor([1.0, -1.0, 1.0, 1.0]), torch.tensor([1.0, 0.0, 0.0, 1.0]))
        telemetry.evaluation(step=step, samples=step, values=metrics.compute())
    telemetry.close()
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(told) == 2
    assert told[0].startswith(
        "the log loss 2.2501 is worse than that of always predicting the share of clicks (0.6931)"
    )


def test_lines_have_a_time_and_the_parts_of_a_step(tmp_path, monkeypatch):
    now = 0.0
    monkeypatch.setattr(recorder, "perf_counter", lambda: now)
    telemetry = open_run(tmp_path)
    for step in range(1, 11):
        for part, seconds in (("data", step), ("forward_backward", 3.0)):
            now += seconds
            telemetry.lap(part)
        one_step(telemetry, step, step * BATCH)
        if step == 5:
            now += 100.0  # an evaluation belongs to no step
            telemetry.evaluation(step=5, samples=5 * BATCH, values=evaluation())
    telemetry.close()
    parts = [line["step_seconds"] for line in lines_of(tmp_path, "train")]
    assert parts == [{"data": 3.0, "forward_backward": 3.0}, {"data": 8.0, "forward_backward": 3.0}]
    times = [line["time"] for line in all_lines(tmp_path)]
    assert times == sorted(times)
    assert time.time() - 100 < times[0] <= time.time()


def test_the_page_says_how_training_ended(tmp_path, caplog, monkeypatch):
    telemetry = open_run(tmp_path)
    train(telemetry, 5)
    telemetry.failed(FloatingPointError("the loss is nan"))
    telemetry.close()
    telemetry.write_page(None)
    page = (tmp_path / "report.html").read_text()
    assert "The run has ended: FloatingPointError: the loss is nan." in page
    monkeypatch.setattr(recorder, "write_page", lambda *_: 1 / 0)
    telemetry.write_page(None)
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.message.startswith("report.html cannot be written (division by zero); `cpr report")
    assert (tmp_path / "report.html").read_text() == page


def test_a_run_that_has_not_begun_gets_no_page(tmp_path):
    telemetry = open_run(tmp_path, begins=False)
    telemetry.failed(ValueError())
    telemetry.close()
    telemetry.write_page(None)
    assert list(tmp_path.iterdir()) == []


def test_other_ranks_stay_silent(tmp_path):
    telemetry = open_telemetry(1, tmp_path)
    assert type(telemetry) is Recorder
    train(telemetry, 5)
    telemetry.evaluation(step=5, samples=5, values=evaluation())
    assert telemetry.finish() is None
    telemetry.close()
    assert list(tmp_path.iterdir()) == []


def test_another_ranks_state_resumes_the_metrics_if_rank_0_is_lost(tmp_path):
    (tmp_path / "lost").mkdir()
    first = open_run(tmp_path / "lost")
    other = Recorder()
    for each in (first, other):
        train(each, 12)
        each.evaluation(step=12, samples=12 * BATCH, values=evaluation())
    first.close()
    second = open_run(tmp_path / "lost", other.state_dict())
    report = second.finish()
    second.close()
    assert [line["step"] for line in lines(tmp_path / "lost")] == [5, 10]  # the evaluation is done again
    assert (report.steps, report.samples) == (12, 12 * BATCH)


def test_exchange_costs_are_written_and_reported(tmp_path):
    telemetry = open_run(tmp_path)
    figures = ExchangeFigures(
        name="ring fp32", steps=5, seconds=0.002, step_seconds=0.01, kept_share=1.0, sent_bytes=800.0
    )
    telemetry.exchange(figures)
    train(telemetry, 5)
    telemetry.exchange(replace(figures, residual_energy=3.0))
    lost = LostResiduals(step=4, ranks=(0,), of_ranks=2, energy_share=None)
    report = telemetry.finish(None, [lost])
    telemetry.close()
    (line,) = lines(tmp_path)
    assert (line["exchange_seconds"], line["exchange_share"]) == (0.002, 0.2)
    assert (line["exchange_bytes"], line["kept_share"]) == (800.0, 1.0)
    assert "residual_energy" not in line
    assert (report.exchange.share, report.exchange.losses) == (0.2, (lost,))
    assert json.loads((tmp_path / "report.json").read_text())["exchange"]["losses"][0]["ranks"] == [0]


def test_the_age_of_a_mirror_is_shown_and_written_once_it_is_whole(tmp_path):
    stream = Terminal()
    telemetry = open_run(tmp_path, stream=stream)
    for figures in (None, MirrorFigures(age=7), MirrorFigures(moments=1, age=3)):
        telemetry.mirror(figures)
        train(telemetry, 5)
    telemetry.close()
    assert [line["age_steps"] for line in all_lines(tmp_path) if line["kind"] == "mirror"] == [3]
    assert "mirror 3 steps old" in stream.getvalue()
    assert "mirror 7" not in stream.getvalue()
    (event,) = EventAccumulator(str(tmp_path)).Reload().Scalars("mirror/age_steps")
    assert (event.step, event.value) == (5, 3)


SAVES = (
    SaveCost(step=4, kind="base", num_bytes=1000, blocked_s=0.5, seconds=2.0),
    SaveCost(step=6, kind="rows", num_bytes=100, blocked_s=0.25, seconds=1.0),
    SaveEvent(step=8, blocked_s=0.75),
    SaveEvent(step=9, failure="no space left"),
)
FIRST = Recovery(
    kind="partial",
    reason="a node was lost",
    generation=1,
    step=3,
    lost_share=0.5,
    pls_added=0.125,
    pls_total=0.125,
    seconds={"detect": 1.0, "restore": 2.0},
)
SECOND = Recovery(kind="process", reason="a worker died", generation=2, step=7, pls_total=None)


def test_saves_and_recoveries_are_written_once(tmp_path):
    telemetry = open_run(tmp_path)
    telemetry.costs(SAVES, [FIRST])
    telemetry.costs((), [FIRST, SECOND])
    telemetry.close()
    assert lines_of(tmp_path, "save") == [
        {"kind": "save", "step": 4, "base": {"bytes": 1000, "seconds": 2.0, "wait_seconds": 0.5}},
        {"kind": "save", "step": 6, "rows": {"bytes": 100, "seconds": 1.0, "wait_seconds": 0.25}},
    ]
    assert lines_of(tmp_path, "save_begun") == [{"kind": "save_begun", "step": 8, "wait_seconds": 0.75}]
    assert lines_of(tmp_path, "save_failed") == [
        {"kind": "save_failed", "step": 9, "reason": "no space left"}
    ]
    first, second = lines_of(tmp_path, "recovery")
    assert first == {
        "kind": "recovery",
        "step": 3,
        "recoveries": 1,
        "how": "partial",
        "seconds": 3.0,
        "phases": {"detect": 1.0, "restore": 2.0},
        "lost_share": 0.5,
        "pls_added": 0.125,
        "pls": 0.125,
    }
    assert (second["step"], second["recoveries"], second["how"], second["pls"]) == (7, 2, "process", None)


@pytest.mark.parametrize("silent", [False, True])
def test_a_restarted_run_writes_new_recoveries_only(tmp_path, silent):
    """Also if rank 0 was lost and resumes from the state of another rank."""
    before = open_run(tmp_path)
    other = Recorder()
    for each in (before, other):
        each.costs(SAVES, [FIRST])
    before.close()
    telemetry = open_run(tmp_path, {**(other if silent else before).state_dict(), "steps": 10})
    telemetry.costs((), [FIRST, SECOND])
    telemetry.close()
    assert [line["recoveries"] for line in lines_of(tmp_path, "recovery")] == [1, 2]
    assert [line["step"] for line in lines_of(tmp_path, "save")] == [4, 6]


def test_lines_of_repeated_steps_are_removed(tmp_path):
    before = open_run(tmp_path)
    before.costs(SAVES, ())
    before.close()
    open_run(tmp_path, {**before.state_dict(), "steps": 4}).close()
    assert [line["step"] for line in lines_of(tmp_path, "save")] == [4]


def test_a_paused_run_that_returns_writes_nothing_into_its_successors_metrics(tmp_path):
    paused = open_run(tmp_path)
    train(paused, 10)
    successor = open_run(tmp_path, {**paused.state_dict(), "steps": 5})
    train(paused, 20)
    assert [line["step"] for line in lines_of(tmp_path, "train")] == [5]
    successor.close()
    paused.close()


def test_tensorboard_gets_scalars_and_hyperparameters(tmp_path):
    telemetry = open_run(tmp_path)
    train(telemetry, 10)
    telemetry.evaluation(step=10, samples=10 * BATCH, values=evaluation())
    telemetry.costs(SAVES, [FIRST, SECOND])
    telemetry.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(5, 3.0), (10, 8.0)]
    assert events.Scalars("train/learning_rates/dense")[0].value == pytest.approx(0.2)
    assert events.Scalars("evaluation/auc")[0].value == 1.0
    assert [(event.step, event.value) for event in events.Scalars("save/base/bytes")] == [(4, 1000)]
    assert events.Scalars("save/rows/wait_seconds")[0].value == 0.25
    assert [(event.step, event.value) for event in events.Scalars("recovery/recoveries")] == [(3, 1), (7, 2)]
    assert [(event.step, event.value) for event in events.Scalars("recovery/pls")] == [(3, 0.125)]
    assert events.Scalars("recovery/phases/restore")[0].value == 2.0
    assert "recovery/how" not in events.Tags()["scalars"]
    assert len(list(tmp_path.glob("events.*"))) == 1
    (start,) = (events.summary_metadata["_hparams_/session_start_info"].plugin_data,)
    values = plugin_data_pb2.HParamsPluginData.FromString(start.content).session_start_info.hparams
    assert values["train.epochs"].number_value == 2
    assert values["model.top_mlp"].string_value == "(64, 1)"


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.mark.parametrize(("seconds", "said"), [(0.1, []), (4.0, ["4 of 8 (50 %)", "7 of 8 (88 %)"])])
def test_without_a_terminal_long_evaluations_log_lines(clock, caplog, seconds, said):
    shown = TrainingProgress(100, 8, io.StringIO())
    with caplog.at_level(logging.INFO, "dlrm"):
        for _ in range(2):
            for _ in range(8):
                shown.evaluate()
                clock[0] += seconds
            shown.end_evaluation()
    assert caplog.messages == 2 * [f"evaluation: batch {each}" for each in said]


def test_on_a_terminal_an_evaluation_has_a_bar_that_goes_away():
    terminal = Terminal()
    shown = TrainingProgress(100, 8, terminal)
    shown.evaluate()
    assert "evaluation:" in terminal.getvalue()
    assert "/8 [" in terminal.getvalue()
    shown.end_evaluation()
    assert shown._evaluation is None
    shown.evaluate()
    shown.close()
    assert shown._evaluation is None


NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_runs_of_the_same_second_get_different_folders(tmp_path):
    folders = [make_run_folder(tmp_path / "runs", "recipes/tiny.toml", NOW) for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "20260102-030405-tiny",
        "20260102-030405-tiny-2",
        "20260102-030405-tiny-3",
    ]
    assert all(folder.is_dir() for folder in folders)
