"""Metrics of saves and recoveries, and the recorded configuration."""

import io
import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from cpr.estimator.history import SaveCost
from cpr.recovery.run.report import Recovery
from dlrm.telemetry import Recorder, Telemetry

SAVES = (
    SaveCost(step=4, kind="base", num_bytes=1000, blocked_s=0.5, seconds=2.0),
    SaveCost(step=6, kind="rows", num_bytes=100, blocked_s=0.25, seconds=1.0),
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
CONFIG = {"train": {"epochs": 2, "device": "cpu"}, "model": {"top_mlp": (64, 1)}, "data": {"shuffle": True}}


@pytest.fixture
def open_run(tmp_path):
    def work(state=None):
        telemetry = Telemetry(
            tmp_path,
            recipe="tiny",
            config=CONFIG,
            total_samples=10,
            device=torch.device("cpu"),
            log_every_steps=5,
            stream=io.StringIO(),
        )
        if state is not None:
            telemetry.load_state_dict(state)
        telemetry.begin()
        return telemetry

    return work


def lines(folder, kind):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if line["kind"] == kind]


def test_saves_and_recoveries_are_written_once(open_run, tmp_path):
    telemetry = open_run()
    telemetry.costs(SAVES, [FIRST])
    telemetry.costs((), [FIRST, SECOND])
    telemetry.close()
    assert lines(tmp_path, "save") == [
        {"kind": "save", "step": 4, "base": {"bytes": 1000, "seconds": 2.0, "wait_seconds": 0.5}},
        {"kind": "save", "step": 6, "rows": {"bytes": 100, "seconds": 1.0, "wait_seconds": 0.25}},
    ]
    first, second = lines(tmp_path, "recovery")
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
def test_a_restarted_run_writes_new_recoveries_only(open_run, tmp_path, silent):
    """Also if rank 0 was lost and resumes from the state of another rank."""
    before = open_run()
    other = Recorder()
    for each in (before, other):
        each.costs(SAVES, [FIRST])
    before.close()
    telemetry = open_run({**(other if silent else before).state_dict(), "steps": 10})
    telemetry.costs((), [FIRST, SECOND])
    telemetry.close()
    assert [line["recoveries"] for line in lines(tmp_path, "recovery")] == [1, 2]
    assert [line["step"] for line in lines(tmp_path, "save")] == [4, 6]


def test_lines_of_repeated_steps_are_removed(open_run, tmp_path):
    before = open_run()
    before.costs(SAVES, ())
    before.close()
    open_run({**before.state_dict(), "steps": 4}).close()
    assert [line["step"] for line in lines(tmp_path, "save")] == [4]


def test_the_configuration_is_recorded_by_key(open_run, tmp_path):
    open_run().close()
    (line,) = lines(tmp_path, "hyperparameters")
    assert (line["train.epochs"], line["model.top_mlp"], line["data.shuffle"]) == (2, [64, 1], True)


def test_tensorboard_gets_scalars_and_hyperparameters(open_run, tmp_path):
    telemetry = open_run()
    telemetry.costs(SAVES, [FIRST, SECOND])
    telemetry.close()
    events = EventAccumulator(str(tmp_path)).Reload()
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
