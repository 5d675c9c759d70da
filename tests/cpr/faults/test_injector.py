"""An injector injects the failures of its plan, and does nothing without one."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import CheckpointError
from cpr.faults import (
    AtRate,
    AtStep,
    AtTime,
    DamageFile,
    Hang,
    InjectedError,
    Injector,
    KillAgent,
    KillWorker,
    Plan,
    Raise,
    Slow,
    StorageDelay,
    StorageError,
    StorageOutage,
    Trace,
)
from cpr.faults.schedules import Event
from tests.cpr.faults.test_damage import contents, make_checkpoint
from tests.cpr.faults.test_storages import write

REPO = Path(__file__).parents[3]


def at(step, kind, target=0, seed=0):
    return Plan(schedules=(AtStep(step=step, kind=kind, target=target, seed=seed),))


def steps_raised(injector, steps, rank=0):
    """Run the steps; returns those in which the injector raised."""
    raised = []
    for step in steps:
        try:
            injector.step(step, rank)
        except InjectedError:
            raised.append(step)
    return raised


@pytest.fixture
def sleeps(monkeypatch):
    """A clock that only sleeping advances; the list of sleeps."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    return slept


def test_injector_without_a_plan_does_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("CPR_FAULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage(tmp_path / "checkpoint")
    for injector in (Injector(), Injector(Plan.from_environment(), folder=tmp_path)):
        assert steps_raised(injector, range(100)) == []
        assert injector.storage(storage) is storage
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == []


def test_exception_is_raised_at_its_step_and_rank(tmp_path, caplog):
    plan = at(3, Raise(message="broken on purpose"), target=1)
    other, victim = (Injector(plan, folder=tmp_path, num_ranks=2) for _ in range(2))
    assert steps_raised(other, range(6), rank=0) == []
    assert steps_raised(victim, range(3), rank=1) == []
    with pytest.raises(InjectedError, match="broken on purpose"):
        victim.step(3, 1)
    assert steps_raised(victim, range(4, 8), rank=1) == []
    assert caplog.messages[-1] == (
        "failure injection: an exception in rank 1 at step 3, as asked for by the program"
    )
    assert caplog.records[-1].levelno == logging.WARNING


@settings(max_examples=40)
@given(
    steps=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    restarts=st.lists(st.integers(0, 30), max_size=4),
)
def test_each_event_happens_once_over_restarts(tmp_path_factory, steps, restarts):
    """Also if steps are repeated after a restart, or skipped in one."""
    folder = tmp_path_factory.mktemp("record")
    events = tuple(Event(step=step, kind=Raise(message=str(step)), target=0) for step in steps)
    plan = Plan(schedules=(Trace(events=events),))
    happened = []
    for first in [0, *sorted(restarts), 31]:
        step, injector = first, Injector(plan, folder=folder, num_ranks=1)
        while step < 32:
            try:
                injector.step(step, 0)
            except InjectedError as error:
                happened.append(int(str(error)))
                injector = Injector(plan, folder=folder, num_ranks=1)  # a new process continues here
            else:
                step += 1
    assert happened == sorted(steps)


def test_failures_before_the_first_step_are_skipped(tmp_path):
    plan = Plan(schedules=(AtStep(step=5, kind=Raise()), AtStep(step=12, kind=Raise())))
    assert steps_raised(Injector(plan, folder=tmp_path, num_ranks=1), range(10, 15)) == [12]


def test_times_count_from_the_first_start_over_restarts(tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    plan = Plan(schedules=(AtTime(time_s=50.0, kind=Raise()), AtTime(time_s=90.0, kind=Raise())))
    first = Injector(plan, folder=tmp_path, num_ranks=1)
    first.step(0, 0)
    now = 1049.9
    assert steps_raised(first, [1]) == []
    now = 1050.0
    assert steps_raised(first, [2, 3]) == [2]
    now = 1200.0
    assert steps_raised(Injector(plan, folder=tmp_path, num_ranks=1), [4, 5]) == [4]


def test_all_ranks_agree_on_drawn_targets(tmp_path):
    rate = AtRate(kinds=(Raise(),), seed=5, mean_steps=4.0, num_events=30)
    plan = Plan(schedules=(rate,))
    for rank in range(3):
        steps_raised(Injector(plan, folder=tmp_path, num_ranks=3), range(400), rank)
    (record,) = tmp_path.glob("faults-*.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    struck = {line["event"]: line["rank"] for line in lines if "event" in line}
    assert struck == {f"0.{number}": event.target_of(3) for number, event in enumerate(rate)}
    assert set(struck.values()) == {0, 1, 2}


def test_missing_rank_is_logged_once(tmp_path, caplog):
    plan = at(2, Raise(), target=7)
    for rank in (1, 0):
        assert steps_raised(Injector(plan, folder=tmp_path, num_ranks=2), range(5), rank) == []
    assert [text for text in caplog.messages if "there is no rank 7" in text] == [
        "failure injection: there is no rank 7 to strike at step 2"
    ]


def test_number_of_ranks_defaults_to_the_world_size(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert steps_raised(Injector(at(2, Raise(), target=1), folder=tmp_path), range(5), rank=1) == [2]


def test_hang_sleeps_for_its_duration(tmp_path, sleeps):
    Injector(at(2, Hang(duration_s=7.0)), folder=tmp_path, num_ranks=1).step(2, 0)
    assert sleeps == [7.0]


def test_slow_worker_sleeps_in_its_steps(tmp_path, sleeps):
    injector = Injector(at(1, Slow(num_steps=3, factor=3.0, extra_s=0.5)), folder=tmp_path, num_ranks=1)
    slept_s = []
    for step in range(8):
        sleeps.append(2.0)  # what the step itself takes
        before = len(sleeps)
        injector.step(step, 0)
        slept_s.append(sum(sleeps[before:]))
    assert slept_s == [0, 0, 4.5, 4.5, 4.5, 0, 0, 0]


def test_file_is_damaged_if_there_is_a_save(tmp_path, caplog):
    folder = make_checkpoint(tmp_path / "checkpoint")
    before = contents(folder)
    Injector(at(2, DamageFile()), folder=tmp_path, num_ranks=1, checkpoint=folder).step(2, 0)
    assert contents(folder) != before
    early = tmp_path / "early"
    Injector(at(2, DamageFile()), folder=early, num_ranks=1, checkpoint=early).step(2, 0)
    assert "nothing was damaged" in caplog.messages[-1]


def test_storage_errors_and_delays_start_at_their_step(tmp_path, monkeypatch):
    plan = Plan(
        schedules=(
            AtStep(step=2, kind=StorageError(operation="create", path="manifest", error="EIO"), target=0),
            AtStep(step=3, kind=StorageDelay(operation="commit", delay_s=9.0, at=2), target=0),
        )
    )
    injector = Injector(plan, folder=tmp_path, num_ranks=1)
    storage = injector.storage(LocalStorage(tmp_path / "checkpoint"))
    injector.step(0, 0)
    write(storage, "manifest.json")
    injector.step(2, 0)
    write(storage, "state.arrow")
    with pytest.raises(CheckpointError, match=r"manifest\.json failed: Input/output error"):
        write(storage, "manifest.json")
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    injector.step(3, 0)
    for expected in ([], [9.0], [9.0]):
        write(storage, "manifest.json")
        assert slept == expected


def test_storage_outage_affects_all_ranks_and_restarted_workers(tmp_path, monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    plan = Plan(schedules=(AtStep(step=2, kind=StorageOutage(duration_s=30.0)),))

    def worker():
        injector = Injector(plan, folder=tmp_path, num_ranks=2)
        return injector, injector.storage(LocalStorage(tmp_path / "checkpoint"))

    def is_out(storage):
        try:
            write(storage)
        except CheckpointError:
            return True
        return False

    workers = [worker(), worker()]
    for rank, (injector, storage) in enumerate(workers):
        injector.step(0, rank)
        assert not is_out(storage)
        injector.step(2, rank)
        assert is_out(storage)
        now += 5.0
    (message,) = [text for text in caplog.messages if "an outage of 30 s" in text]
    assert "in which all operations fail with EIO, of the storage of all ranks at step 2" in message
    restarted, storage = worker()
    assert is_out(storage)  # before its first step
    now = 1030.0  # counted from when the first rank came to it
    assert not any(is_out(storage) for storage in (storage, *(each for _, each in workers)))
    restarted.step(2, 0)
    assert not is_out(storage)  # an outage happens once


def test_storage_failures_need_a_wrapped_storage(tmp_path):
    for kind in (StorageError(), StorageOutage()):
        injector = Injector(at(2, kind), folder=tmp_path, num_ranks=1)
        with pytest.raises(ValueError, match=r"pass it through Injector\.storage"):
            injector.step(2, 0)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (Raise(), {"folder": None}, "need folder"),
        (KillWorker(wipe=True), {}, "need memory"),
        (DamageFile(), {}, "need checkpoint"),
        (KillAgent(), {}, "only be done by a Killer"),
    ],
)
def test_missing_folders_are_refused_before_training(tmp_path, kind, given, message):
    with pytest.raises(ValueError, match=message):
        Injector(at(2, kind), **{"folder": tmp_path, **given})


PROGRAM = """
import sys
from pathlib import Path
from cpr.checkpoint.storage.local import LocalStorage
from cpr.faults import Injector, Plan
folder = Path(sys.argv[1])
injector = Injector(Plan.from_environment(), folder=folder, num_ranks=2, memory=folder / "memory")
storage = injector.storage(LocalStorage(folder / "checkpoint"))
for step in range(int(sys.argv[2]), 6):
    injector.step(step, 0)
    print(step, flush=True)
    with storage.create(f"save{step}") as sink:
        sink.write(memoryview(b"content"))
"""


def start(folder, plan, first=0):
    """A worker of two, with the plan in its environment."""
    path = folder / "faults.json"
    path.write_text(json.dumps(plan.to_json()))
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, folder, str(first)],
        env={**os.environ, "CPR_FAULTS": str(path)},
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.system
@pytest.mark.timeout(180)
def test_worker_is_killed_during_a_save(tmp_path):
    worker = start(tmp_path, at(2, StorageError(operation="commit", error="KILL")))
    worker.communicate(timeout=50)
    assert worker.returncode == -signal.SIGKILL
    assert list(LocalStorage(tmp_path / "checkpoint").list()) == ["save0", "save1"]
