"""Plans as JSON documents, and documents that are refused."""

import json

import pytest
from hypothesis import given

from cpr.faults import (
    AtRate,
    AtStep,
    AtTime,
    Hang,
    KillAgent,
    KillWorker,
    Partition,
    PauseNode,
    Plan,
    Raise,
    StorageError,
    StorageOutage,
    injector,
)
from tests.cpr.faults.strategies import plans


@given(made=plans)
def test_plan_survives_json(made):
    document = json.loads(json.dumps(made.to_json()))
    again = Plan.from_json(document)
    assert again == made
    assert again.digest == made.digest
    assert again.digest != Plan(schedules=(*made.schedules, AtStep(step=1, kind=Raise()))).digest


def test_document_in_the_docstring_is_read(tmp_path):
    path = tmp_path / "faults.json"
    path.write_text(injector.__doc__[injector.__doc__.index("{") : injector.__doc__.rindex("}") + 1])
    read = Plan.read(path)
    assert read.schedules[:3] == (
        AtStep(step=37, kind=KillWorker(), target=1),
        AtTime(time_s=60.0, kind=Hang(duration_s=20.0)),
        AtRate(
            mean_s=60.0,
            seed=7,
            distribution="gamma",
            shape=0.7,
            kinds=(KillWorker(), KillWorker(wipe=True)),
            num_events=30,
        ),
    )
    assert [event.kind for event in read.schedules[3]] == [Raise()]
    assert read.source == str(path)


def at_step(**fields):
    return {"schedule": "at_step", "step": 3, "kind": "raise", **fields}


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "choose one of at_step, at_time, at_rate, trace"),
        ([], "choose one of at_step"),
        ({"schedule": "at_step", "step": 3}, r"schedules\[0\] lacks 'kind'"),
        (at_step(kind="burn"), "'burn' is no kind of failure; the kinds are raise, abort, kill_worker"),
        (at_step(kind=7), "7 is no kind of failure"),
        (at_step(step=3.5), r"schedules\[0\].step is 3.5, not a whole number"),
        (at_step(step=None), "give one of the two"),
        (at_step(rank=1), r"schedules\[0\] has 'rank', which"),
        (at_step(kind={"kind": "hang", "seconds": 3}), r"schedules\[0\].kind has 'seconds', which"),
        (at_step(kind={"kind": "kill_worker", "wipe": "yes"}), "wipe is 'yes', neither true nor false"),
        (at_step(kind={"kind": "storage_error", "error": "EBAD"}), "give a name of errno"),
        (at_step(kind={"kind": "storage_error", "operation": "sync"}), "not one of 'create', "),
        (at_step(kind={"kind": "storage_outage", "error": "KILL"}), "give a name of errno"),
        (at_step(kind={"kind": "partition", "duration_s": 0}), "duration_s is 0.0; it must be a positive"),
        ({"schedule": "at_rate", "seed": 1, "mean_s": 3, "kinds": "raise"}, "kinds is 'raise', not a list"),
        ({"schedule": "trace", "events": [3]}, r"events\[0\] is 3, not an object"),
    ],
)
def test_wrong_schedule_is_named(schedule, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json({"format": "cpr-faults", "version": 1, "schedules": [schedule]})


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "not an object"),
        ({"format": "cpr-faults", "version": 1}, "lacks 'schedules'"),
        ({"format": "cpr-faults", "version": 2, "schedules": []}, "version is 2, not one of 1"),
        ({"format": "x", "version": 1, "schedules": []}, "format is 'x', not one of 'cpr-faults'"),
    ],
)
def test_invalid_document_is_refused(document, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_json(document)


def test_plan_is_read_from_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(Plan(schedules=(AtStep(step=3, kind=Raise()),)).to_json()))
    monkeypatch.setenv("CPR_FAULTS", str(path))
    read = Plan.from_environment()
    assert (len(read.schedules), read.source) == (1, f"CPR_FAULTS={path}")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.json", None, r"\(CPR_FAULTS=.*missing\.json\) cannot be read: No such file"),
        ("broken.json", "{", r"broken\.json is no plan of failures"),
        (
            "none.json",
            json.dumps(Plan().to_json()),
            r"none\.json asks for no failure: add schedules, or unset",
        ),
        (
            "outside.json",
            json.dumps(Plan(schedules=(AtTime(time_s=1, kind=KillAgent()),)).to_json()),
            "kill_agent can only be done by a Killer",
        ),
    ],
)
def test_invalid_plan_in_the_environment_is_refused(tmp_path, monkeypatch, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("CPR_FAULTS", str(tmp_path / name))
    with pytest.raises(ValueError, match=message):
        Plan.from_environment()


def test_plan_is_empty_without_the_environment_variable(monkeypatch):
    monkeypatch.delenv("CPR_FAULTS", raising=False)
    assert Plan.from_environment() == Plan()
    monkeypatch.setenv("CPR_FAULTS", "")
    assert Plan.from_environment() == Plan()


def test_drivers_refuse_kinds_of_the_other_driver():
    for kind in (Raise(), StorageError(), StorageOutage()):
        with pytest.raises(ValueError, match="only be done by the workers themselves"):
            Plan(schedules=(AtTime(time_s=1, kind=kind),)).check(inside=False)
    for kind in (KillAgent(), PauseNode(), Partition()):
        with pytest.raises(ValueError, match="only be done by a Killer"):
            Plan(schedules=(AtTime(time_s=1, kind=kind),)).check(inside=True)
    with pytest.raises(ValueError, match="cannot be seen from outside"):
        Plan(schedules=(AtStep(step=1, kind=KillWorker()),)).check(inside=False)
    both = Plan(schedules=(AtTime(time_s=1, kind=KillWorker()), AtTime(time_s=1, kind=Hang())))
    both.check(inside=True)
    both.check(inside=False)
