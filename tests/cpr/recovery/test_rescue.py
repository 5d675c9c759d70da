"""Memory of a run that could not save is kept; `cpr rescue` saves it, and training continues from there."""

import shutil
import sys
from contextlib import suppress
from dataclasses import replace

import pytest
import torch.distributed as dist

from cpr.checkpoint.ownership.records import newest_owner, write_owner
from cpr.checkpoint.save.writer_thread import RankWriter
from cpr.checkpoint.storage.base import open_storage
from cpr.cli.main import entry
from cpr.errors import MismatchError, SaveFailedError
from cpr.resident.folders import unsaved_segments
from cpr.resident.janitor import watch
from cpr.resident.layout import LAYOUT_FILE
from cpr.resident.segment import Segment
from tests.cpr.checkpoint.saves import commit
from tests.cpr.recovery.workers import assert_same


def disk_full(*_):
    raise OSError(28, "No space left on device")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Gives the folder of the only run; no process restarts it any more. The memory is freed afterwards."""
    monkeypatch.setenv("CPR_RESIDENT_ROOT", str(tmp_path / "memory"))
    monkeypatch.setattr("cpr.saving.periodic.FIRST_PAUSE_S", 0.0)

    def find():
        (folder,) = (tmp_path / "memory").glob("*/*")
        for keeper in folder.glob("keeper-*"):
            keeper.unlink()
        return folder

    yield find
    shutil.rmtree(tmp_path / "memory", ignore_errors=True)  # a janitor stays as long as unsaved memory does


@pytest.fixture
def unsaved(new_worker, monkeypatch, home):
    """A worker that has trained 28 steps, of which the last 23 could not be saved."""
    worker = new_worker(restarted=False).restore().train(5).wait_for_save()
    with monkeypatch.context() as broken:
        broken.setattr(RankWriter, "write", disk_full)
        worker.train(22)
        with suppress(SaveFailedError):  # unless a step has noticed it already
            worker.wait_for_save()
        worker.train(1)
    return worker


@pytest.mark.parametrize("out", ["other", "checkpoint"])
def test_what_a_dead_run_could_not_save_is_saved_and_trained_on(
    unsaved, new_worker, home, tmp_path, capsys, out
):
    values = unsaved.values()
    unsaved.die()
    folder = home()
    watch(folder)
    assert entry(["clean", "--yes"]) == 0
    assert f"not saved: `cpr rescue {folder.name} --out DIR` saves it" in capsys.readouterr().out
    assert entry(["rescue", "--out", str(tmp_path / out)]) == 0
    assert "at step 28" in capsys.readouterr().out
    assert entry(["verify", str(tmp_path / out)]) == 0
    assert entry(["clean", "--yes"]) == 0
    assert not folder.exists()

    again = new_worker(restarted=False, folder=tmp_path / out).restore()
    assert (again.story.kind, again.story.step) == ("resume", 28)
    assert_same(again.values(), values)
    again.train(5).wait_for_save()
    again.recovery.close()
    dist.destroy_process_group()


def test_a_new_launch_does_not_resume_over_what_is_only_in_memory(
    unsaved, new_worker, home, tmp_path, monkeypatch
):
    values = unsaved.values()
    unsaved.die()
    folder = home()
    monkeypatch.setenv("CPR_LAUNCH", "another")
    for restarted in (False, True):
        with pytest.raises(MismatchError) as refused:
            new_worker(restarted=restarted).restore()
        dist.destroy_process_group()
    assert f"cpr rescue {folder.name} --out {tmp_path / 'checkpoint'}" in str(refused.value)
    assert "the newest save is of step 5" in str(refused.value)
    assert entry(["rescue", folder.name, "--out", str(tmp_path / "checkpoint")]) == 0
    again = new_worker(restarted=False).restore()
    assert again.recovery.steps_done == 28
    assert_same(again.values(), values)


def test_memory_that_a_later_save_made_useless_stops_no_new_launch(unsaved, new_worker, home, monkeypatch):
    unsaved.train(200).wait_for_save()
    segment = unsaved.recovery._memory.segment
    segment.mark_unsaved(5)
    newest = unsaved.recovery.checkpointer.newest_step
    unsaved.die()
    home()
    monkeypatch.setenv("CPR_LAUNCH", "another")
    assert new_worker(restarted=False).restore().recovery.steps_done == newest


def test_a_step_that_was_interrupted_is_skipped_after_a_rescue(unsaved, new_worker, home, tmp_path):
    unsaved.forward_backward()
    unsaved.die()
    home()
    assert entry(["rescue", "--out", str(tmp_path / "other")]) == 0
    again = new_worker(restarted=False, folder=tmp_path / "other").restore()
    assert (again.story.step, again.recovery.batches_to_skip) == (28, 1)


def test_only_what_a_user_asks_for_is_freed(unsaved, home, capsys):
    unsaved.die()
    folder = home()
    assert entry(["clean", "--yes", "--unsaved"]) == 0
    assert "removed" in capsys.readouterr().out
    assert not folder.exists()


def test_memory_of_which_some_is_elsewhere_is_refused(unsaved, home, tmp_path, capsys):
    unsaved.die()
    (segment,) = unsaved_segments(home())
    layout = Segment(segment).layout
    replace(layout, world_size=3, rank=1).write(segment)
    assert entry(["rescue", "--out", str(tmp_path / "other")]) == 2
    assert "the memory of rank 0, rank 2 of 3 is not whole on this machine" in capsys.readouterr().err
    assert not list((tmp_path / "other").glob("saves/*"))


def test_memory_is_not_saved_over_what_is_newer(unsaved, new_worker, home, tmp_path, capsys):
    unsaved.train(200).wait_for_save().train(1)  # a step notices that the save before it was made
    assert not unsaved_segments(home()), "it was saved since"
    newer = unsaved.recovery.checkpointer.newest_step
    assert newer > 28
    segment = unsaved.recovery._memory.segment
    segment.status.epoch = 0
    unsaved.die()
    assert entry(["rescue", "--out", str(tmp_path / "checkpoint")]) == 2
    assert "no memory of a dead run that was not saved" in capsys.readouterr().err
    assert entry(["rescue", home().name, "--out", str(tmp_path / "checkpoint")]) == 2
    assert "was made after it" in capsys.readouterr().err
    assert entry(["rescue", "nobody", "--out", str(tmp_path / "checkpoint")]) == 2
    assert "no memory of a run nobody" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "says"),
    [({"session": "another"}, "not of the run that saved last"), ({"finished": 28}, "finished at step 28")],
)
def test_memory_of_another_or_a_finished_run_is_refused_and_the_directory_is_not_taken(
    unsaved, home, tmp_path, capsys, change, says
):
    unsaved.die()
    home()
    storage = open_storage(str(tmp_path / "checkpoint"))
    owner = replace(newest_owner(storage), **change)
    write_owner(storage, owner)
    commit(storage, 1, epoch=owner.epoch)
    assert entry(["rescue", "--out", str(tmp_path / "checkpoint")]) == 2
    assert says in capsys.readouterr().err
    assert newest_owner(storage) == owner


def test_memory_in_use_is_not_rescued(unsaved, tmp_path, capsys, home):
    name = unsaved.recovery.memory_folder.parent.name
    assert entry(["rescue", name, "--out", str(tmp_path / "other")]) == 2
    assert "in use by 1 live worker" in capsys.readouterr().err


def test_a_last_save_that_fails_keeps_the_memory_and_says_how_to_rescue_it(
    new_worker, monkeypatch, caplog, home, tmp_path
):
    worker = new_worker(restarted=False, give_up_after_s=1e-9).restore().train(7)
    monkeypatch.setattr(RankWriter, "write", disk_full)
    with pytest.raises(SaveFailedError), worker.recovery:
        sys.stdout.flush()
    worker.die()
    folder = home()
    told = [each.message for each in caplog.records if "cpr rescue" in each.message]
    assert len(told) == 1
    assert "up to step 7 is not saved" in told[0]
    assert f"cpr rescue {folder.name} --out {tmp_path / 'checkpoint'}" in told[0]
    watch(folder)
    assert unsaved_segments(folder)


def test_the_last_save_waits_for_storage_and_keeps_the_memory_meanwhile(
    new_worker, monkeypatch, caplog, home
):
    worker = new_worker(restarted=False).restore().train(5).wait_for_save().train(2)
    values = worker.values()
    outage = pytest.MonkeyPatch()
    kept = []

    def repaired(pause_s):
        kept.append((pause_s, bool(unsaved_segments(home()))))
        if len(kept) == 2:
            outage.undo()

    monkeypatch.setattr("cpr.saving.periodic.time.sleep", repaired)
    outage.setattr(RankWriter, "write", disk_full)
    with worker.recovery:
        pass
    assert kept == [(0.0, True)] * 2
    assert len([each for each in caplog.records if each.levelname == "ERROR"]) == 2
    dist.destroy_process_group()
    assert_same(new_worker(restarted=False).restore().values(), values)


def test_a_rescue_into_a_folder_where_no_run_would_look_is_refused(unsaved, home, tmp_path, capsys):
    unsaved.die()
    folder = home()
    run = tmp_path / "run"
    (run / "checkpoint").mkdir(parents=True)
    assert entry(["rescue", "--out", str(run)]) == 2
    assert f"neither empty nor a checkpoint directory: give {run / 'checkpoint'}" in capsys.readouterr().err
    assert entry(["rescue", "--out", str(folder / "saved")]) == 2
    assert "is shared memory, which `cpr clean` frees" in capsys.readouterr().err
    assert unsaved_segments(folder)
    assert [each.name for each in run.iterdir()] == ["checkpoint"]


def test_a_refused_rescue_keeps_damaged_memory(unsaved, home, tmp_path, capsys):
    unsaved.die()
    (segment,) = unsaved_segments(home())
    part = segment / LAYOUT_FILE
    content = part.read_bytes()
    part.write_bytes(content[:100])
    assert entry(["rescue", "--out", str(tmp_path / "other")]) == 2
    assert "left alone, because it was not saved" in capsys.readouterr().err
    part.write_bytes(content)
    assert entry(["rescue", "--out", str(tmp_path / "other")]) == 0


def test_giving_up_between_two_steps_costs_no_batch(new_worker, home):
    worker = new_worker(restarted=False, give_up_after_s=1e-9).restore()
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(RankWriter, "write", disk_full)
        with pytest.raises(SaveFailedError), worker.recovery:
            worker.train(60)
    steps_done, values = worker.recovery.steps_done, worker.values()
    worker.die()
    again = new_worker().restore()
    assert (again.recovery.steps_done, again.recovery.batches_to_skip) == (steps_done, 0)
    assert_same(again.values(), values)
