"""What an injector does to the worker that holds it, and when it does nothing."""

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
from cpr.faults.processes import victim
from cpr.faults.schedules import Event
from tests.cpr.faults.processes import state_of, wait_for
from tests.cpr.faults.test_damage import contents, make_checkpoint
from tests.cpr.faults.test_storages import write

REPO = Path(__file__).parents[3]


def at(step, kind, target=0, seed=0):
    return Plan(schedules=(AtStep(step=step, kind=kind, target=target, seed=seed),))


def steps_raised(injector, steps, rank=0):
    """Drive it through the steps; gives those in which it raised."""
    raised = []
    for step in steps:
        try:
            injector.step(step, rank)
        except InjectedError:
            raised.append(step)
    return raised


@pytest.fixture
def sleeps(monkeypatch):
    """A clock that only sleeping moves; what was slept."""
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "monotonic", lambda: sum(slept))
    return slept


def test_without_a_plan_nothing_is_done_and_nothing_written(tmp_path, monkeypatch, caplog):
    monkeypatch.delenv("CPR_FAULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage(tmp_path / "checkpoint")
    for injector in (Injector(), Injector(Plan.from_environment(), folder=tmp_path)):
        assert not injector.is_on
        assert steps_raised(injector, range(100)) == []
        assert injector.storage(storage) is storage
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == []


def test_an_exception_at_its_step_in_its_rank(tmp_path, caplog):
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
    """Whatever steps are done again after a restart, or left out in one."""
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
                injector = Injector(plan, folder=folder, num_ranks=1)  # a new process goes on with this step
            else:
                step += 1
    assert happened == sorted(steps)


def test_a_step_left_out_by_a_recovery_does_not_lose_its_failure(tmp_path):
    assert steps_raised(Injector(at(5, Raise()), folder=tmp_path, num_ranks=1), range(5)) == []
    assert steps_raised(Injector(at(5, Raise()), folder=tmp_path, num_ranks=1), range(6, 9)) == [6]


def test_what_was_over_when_the_injection_began_does_not_happen(tmp_path):
    plan = Plan(schedules=(AtStep(step=5, kind=Raise()), AtStep(step=12, kind=Raise())))
    assert steps_raised(Injector(plan, folder=tmp_path, num_ranks=1), range(10, 15)) == [12]


def test_another_plan_in_the_same_folder_has_a_record_of_its_own(tmp_path):
    for seed in (1, 2):
        injector = Injector(at(1, Raise(), seed=seed), folder=tmp_path, num_ranks=1)
        assert steps_raised(injector, range(3)) == [1]
    assert len(list(tmp_path.glob("faults-*.jsonl"))) == 2


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


def test_a_drawn_target_is_one_rank_and_all_ranks_agree(tmp_path):
    rate = AtRate(kinds=(Raise(),), seed=5, mean_steps=4.0, num_events=30)
    plan = Plan(schedules=(rate,))
    for rank in range(3):
        steps_raised(Injector(plan, folder=tmp_path, num_ranks=3), range(400), rank)
    (record,) = tmp_path.glob("faults-*.jsonl")
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    struck = {line["event"]: line["rank"] for line in lines if "event" in line}
    assert struck == {f"0.{number}": event.target_of(3) for number, event in enumerate(rate)}
    assert set(struck.values()) == {0, 1, 2}


def test_a_rank_that_does_not_exist_is_said_once(tmp_path, caplog):
    plan = at(2, Raise(), target=7)
    for rank in (1, 0):
        assert steps_raised(Injector(plan, folder=tmp_path, num_ranks=2), range(5), rank) == []
    assert [text for text in caplog.messages if "there is no rank 7" in text] == [
        "failure injection: there is no rank 7 to strike at step 2"
    ]


def test_the_number_of_ranks_is_torchruns(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert steps_raised(Injector(at(2, Raise(), target=1), folder=tmp_path), range(5), rank=1) == [2]


def test_a_hang_is_as_long_as_it_says(tmp_path, sleeps):
    Injector(at(2, Hang(duration_s=7.0)), folder=tmp_path, num_ranks=1).step(2, 0)
    assert sleeps == [7.0]


def test_a_slow_worker_takes_longer_for_so_many_steps(tmp_path, sleeps):
    injector = Injector(at(1, Slow(num_steps=3, factor=3.0, extra_s=0.5)), folder=tmp_path, num_ranks=1)
    dragged = []
    for step in range(8):
        sleeps.append(2.0)  # what the step itself takes
        before = len(sleeps)
        injector.step(step, 0)
        dragged.append(sum(sleeps[before:]))
    assert dragged == [0, 0, 4.5, 4.5, 4.5, 0, 0, 0]


def test_a_file_is_damaged_or_it_is_said_that_it_is_too_early(tmp_path, caplog):
    folder = make_checkpoint(tmp_path / "checkpoint")
    before = contents(folder)
    Injector(at(2, DamageFile()), folder=tmp_path, num_ranks=1, checkpoint=folder).step(2, 0)
    assert contents(folder) != before
    early = tmp_path / "early"
    Injector(at(2, DamageFile()), folder=early, num_ranks=1, checkpoint=early).step(2, 0)
    assert "nothing was damaged" in caplog.messages[-1]


def test_storage_fails_and_is_slow_from_the_step_on(tmp_path, monkeypatch):
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


def test_a_storage_outage_strikes_all_ranks_and_those_that_are_restarted_in_it(tmp_path, monkeypatch, caplog):
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
    (told,) = [text for text in caplog.messages if "an outage of 30 s" in text]
    assert "in which all operations fail with EIO, of the storage of all ranks at step 2" in told
    restarted, storage = worker()
    assert is_out(storage)  # while it is being restored, before it has come to any step
    now = 1030.0  # counted from when the first rank came to it
    assert not any(is_out(storage) for storage in (storage, *(each for _, each in workers)))
    restarted.step(2, 0)
    assert not is_out(storage)  # it happens once


def test_storage_failures_without_the_storage_are_a_mistake_that_is_said(tmp_path):
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
def test_what_a_plan_needs_is_asked_for_before_training(tmp_path, kind, given, message):
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
@pytest.mark.parametrize("wipe", [False, True])
def test_a_worker_kills_itself_once_over_restarts(tmp_path, wipe):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/tables").write_bytes(b"rows")
    plan = Plan(
        schedules=(
            AtStep(step=3, kind=KillWorker(wipe=wipe), target=0),
            AtStep(step=4, kind=KillWorker(wipe=wipe), target=1),
        )
    )
    killed = start(tmp_path, plan)
    output, errors = killed.communicate(timeout=50)
    assert (killed.returncode, output.split()) == (-signal.SIGKILL, ["0", "1", "2"])
    assert f"kill -9 of rank 0{' with its resident memory' if wipe else ''} at step 3" in errors
    assert f"as asked for by CPR_FAULTS={tmp_path / 'faults.json'}" in errors
    assert (tmp_path / "memory").exists() != wipe
    again = start(tmp_path, plan, first=3)
    assert (again.communicate(timeout=50)[0].split(), again.returncode) == (["3", "4", "5"], 0)


@pytest.mark.system
@pytest.mark.timeout(180)
def test_a_kill_in_the_middle_of_a_save(tmp_path):
    worker = start(tmp_path, at(2, StorageError(operation="commit", error="KILL")))
    worker.communicate(timeout=50)
    assert worker.returncode == -signal.SIGKILL
    assert list(LocalStorage(tmp_path / "checkpoint").list()) == ["save0", "save1"]


@pytest.mark.system
@pytest.mark.timeout(180)
def test_a_hanging_worker_stands_still_and_can_still_be_ended(tmp_path):
    worker = start(tmp_path, at(2, Hang(duration_s=1000.0)))
    assert [worker.stdout.readline() for _ in range(2)] == ["0\n", "1\n"]
    wait_for(lambda: any("a hang of 1000 s" in line for line in [worker.stderr.readline()]))
    wait_for(lambda: state_of(victim(worker.pid)) == "S")
    worker.terminate()
    assert (worker.communicate(timeout=50)[0], worker.returncode) == ("", -signal.SIGTERM)
