"""When partial recovery is on, and how a restarted run finds its folder."""

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

from cpr.checkpoint.collectives import Alone
from cpr.faults import AtStep, Plan, Raise
from cpr.priority.config import SCHEMES
from cpr.recovery.worker.memory import launch_of_this_worker
from dlrm.config.recipe import load_config
from dlrm.config.schema import CheckpointConfig
from dlrm.fault_tolerance.setup import LAUNCHES, open_recovery


@pytest.fixture
def config(small_dataset, tmp_path, monkeypatch):
    monkeypatch.setenv("CPR_RESIDENT_ROOT", str(tmp_path))
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")

    def work(*overrides):
        runs = tmp_path / "runs"
        runs.mkdir(exist_ok=True)
        base = (f"data.uri={small_dataset}", f"train.run_folder={runs}", "data.global_batch_size=100")
        return load_config("tiny", [*base, "checkpoint.every_steps=2", *overrides])

    return work


def test_recovery_is_on_if_workers_are_restarted_and_the_run_saves(config, monkeypatch):
    assert open_recovery(config(), None) is not None
    assert open_recovery(config("checkpoint.every_steps=0"), None) is None
    assert open_recovery(config("recovery.enabled=false"), None) is None
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert open_recovery(config(), None) is None
    monkeypatch.setenv("CPR_LAUNCH", "of cpr run")
    assert open_recovery(config(), None) is not None


@pytest.mark.parametrize(
    "how",
    [
        ("checkpoint.priority=mfu",),
        ("checkpoint.every_steps=0", "checkpoint.target_pls=0.1", "checkpoint.mean_hours_to_failure=28"),
    ],
)
def test_priority_and_target_pls_need_partial_recovery(config, monkeypatch, how):
    assert open_recovery(config(*how), None) is not None
    with pytest.raises(ValueError, match="partial recovery: give torchrun --max-restarts"):
        open_recovery(config(*how, "recovery.enabled=false"), None)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(ValueError, match="partial recovery"):
        open_recovery(config(*how), None)


def test_fault_plans_need_partial_recovery(config, tmp_path, monkeypatch):
    path = tmp_path / "faults.json"
    monkeypatch.setenv("CPR_FAULTS", str(path))
    with pytest.raises(ValueError, match=r"CPR_FAULTS=.*faults\.json.* cannot be read"):
        open_recovery(config(), None)
    path.write_text(json.dumps(Plan(schedules=(AtStep(step=3, kind=Raise()),)).to_json()))
    assert open_recovery(config(), None) is not None
    for without in ("checkpoint.every_steps=0", "recovery.enabled=false"):
        with pytest.raises(ValueError, match=r"CPR_FAULTS=.*faults\.json asks for failures.* --max-restarts"):
            open_recovery(config(without), None)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    with pytest.raises(ValueError, match="asks for failures"):
        open_recovery(config(), None)


def test_configured_priorities_are_the_implemented_schemes():
    assert ("none", *SCHEMES) == get_args(get_type_hints(CheckpointConfig)["priority"])


@pytest.fixture
def joined(config):
    """Makes recoveries whose workers have joined."""

    def work(session_id, continues):
        recovery = open_recovery(config(), None)
        recovery._partial._worker_group = SimpleNamespace(
            session_id=session_id,
            continues=continues,
            rank=0,
            world_size=1,
            launches=frozenset({launch_of_this_worker()}),
            infos=(),
        )
        recovery._partial._group = Alone()
        recovery._partial._memory.segment = SimpleNamespace(folder=None)
        return recovery

    return work


def make_runs(tmp_path, **launches):
    """Run folders with these names in their notes, oldest first."""
    for age, (name, known) in enumerate(launches.items()):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / LAUNCHES).write_text("".join(f"{each}\n" for each in known))
        os.utime(folder, (age, age))
    return tmp_path / "runs"


def test_a_restarted_run_finds_the_folder_of_its_session(joined, tmp_path):
    runs = make_runs(tmp_path, other=["x"], mine=["s1", "y"], newer=["z"])
    assert joined("s1", continues=True).find_folder(runs) == runs / "mine"
    assert joined("unknown", continues=True).find_folder(runs) is None


def test_a_new_run_takes_no_folder_though_its_launch_is_known(joined, tmp_path):
    recovery = joined("new", continues=False)
    runs = make_runs(tmp_path, before=recovery._partial.worker_group.launches)
    assert recovery.find_folder(runs) is None
    assert joined("new", continues=True).find_folder(runs) == runs / "before"


@pytest.fixture
def folder(tmp_path):
    """A new run folder."""
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    return folder


def test_the_folder_records_session_and_launch(joined, folder):
    first = joined("s1", continues=False)
    first.save_in(folder)
    joined("s2", continues=True).save_in(folder)  # all memory was lost, and with it the session
    assert set((folder / LAUNCHES).read_text().split()) == {"s1", "s2", *first._partial.worker_group.launches}


def test_a_session_that_begins_on_another_node_finds_the_folder(joined, folder):
    """All agents were lost with all memory: who is rank 0 now need not be where rank 0 was."""
    first, second = joined("s1", continues=False), joined("s2", continues=True)
    first._partial.worker_group.launches = {"of node 0", "of node 1"}
    first.save_in(folder)
    second._partial.worker_group.launches = {"of node 1", "of a new node"}
    assert second.find_folder(folder.parent) == folder


def test_a_kill_while_ids_are_written_keeps_the_old_ones(joined, folder, monkeypatch):
    joined("s1", continues=False).save_in(folder)

    def die(path, text):
        path.open("w").close()
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", die)
    with pytest.raises(KeyboardInterrupt):
        joined("s2", continues=True).save_in(folder)
    assert joined("s1", continues=True).find_folder(folder.parent) == folder


def test_restarted_workers_need_no_room_on_the_disk(joined, folder, monkeypatch):
    joined("s1", continues=False).save_in(folder)
    known = (folder / LAUNCHES).read_text()

    def full(path, text):
        path.open("w").close()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    joined("s1", continues=True).save_in(folder)
    joined("s2", continues=True).save_in(folder)  # all memory was lost: found by the launch
    assert (folder / LAUNCHES).read_text() == known
    with pytest.raises(OSError, match="No space left"):
        joined("s3", continues=False).save_in(folder.parent)  # where none of its ids is known


def test_another_launch_with_the_same_rdzv_id_takes_no_folder(joined, folder, monkeypatch):
    """A new session, although torchrun reports a restart: only the launch id tells the runs apart."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "chosen by hand")
    joined("s1", continues=False).save_in(folder)
    assert joined("s2", continues=True).find_folder(folder.parent) == folder
    monkeypatch.setenv("CPR_AGENT_PID", str(os.getpid()))  # another torchrun than our parent
    assert joined("s2", continues=True).find_folder(folder.parent) is None


def test_a_torchrun_that_replaces_another_under_cpr_run_finds_the_folder(joined, folder, monkeypatch):
    monkeypatch.setenv("CPR_LAUNCH", "of cpr run")
    joined("s1", continues=False).save_in(folder)
    monkeypatch.setenv("CPR_AGENT_PID", str(os.getpid()))
    assert joined("s2", continues=True).find_folder(folder.parent) == folder
