"""Memory that comes back after its directory has moved on is not used; a finished run stays finished."""

import errno
import shutil
from dataclasses import replace

import pytest

import cpr
from cpr.checkpoint import checkpointer as checkpointer_module
from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.ownership.records import Owner, newest_owner, write_owner
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import CheckpointError, LockedError, RunFinished, SaveFailedError
from cpr.faults.storages import FaultyStorage
from cpr.recovery.decide import lineage
from cpr.recovery.decide.assessment import assess
from cpr.recovery.decide.lineage import Directory, SavedState
from tests.cpr.recovery.decide.test_assessment import segment, worker
from tests.cpr.recovery.workers import BATCH, assert_same

OWNER = Owner(
    epoch=4, token="0a", run="other", host="far", place="there", pid=7, started=8, session="s", accepted=()
)


def saved(step, epoch=2, base_step=None):
    base_step = step if base_step is None else base_step
    return SavedState(sequence=3, epoch=epoch, step=step, base_step=base_step)


@pytest.mark.parametrize(
    ("newest", "owner", "why"),
    [
        (None, None, None),
        (saved(100), None, None),
        (saved(121), None, "of step 120 (epoch 2), but save 3 of step 121"),
        (saved(90, epoch=3), None, "but save 3 of step 90 (epoch 3) was made after it"),
        (None, replace(OWNER, epoch=2), None),
        (None, replace(OWNER, session="mine"), None),  # a generation that died before it trained
        (None, OWNER, "run 'other' (process 7 on far) has owned the directory since then (epoch 4)"),
    ],
)
def test_memory_of_step_120_and_epoch_2(newest, owner, why):
    found = Directory(newest=newest, owner=owner, session_id="mine").why_stale(epoch=2, step=120)
    assert found is None if why is None else why in found


@pytest.mark.parametrize(("base_step", "is_stale"), [(120, False), (121, True)])
def test_a_mirror_may_be_older_than_a_row_save_but_not_than_a_full_one(base_step, is_stale):
    directory = Directory(newest=saved(125, base_step=base_step))
    assert (directory.why_stale(epoch=2, step=120, is_mirror=True) is not None) == is_stale
    assert directory.why_stale(epoch=2, step=120) is not None


def test_a_worker_that_returns_stops_no_worker_with_fresh_memory():
    directory = Directory(newest=saved(7))
    fresh, stale = segment(0, epoch=2), segment(1, epoch=1, step=9, slot=9)
    found = assess([worker(0, fresh), worker(1, stale)], directory)
    assert (found.slot.step, found.epoch, found.stale) == (7, 2, None)
    assert list(found.lost) == [1]
    assert "memory of old rank 1 on here: of step 9 (epoch 1), but save 3 of step 7" in found.refused[0]


def test_where_all_memory_is_stale_all_workers_go_back_and_both_steps_are_told():
    directory = Directory(newest=saved(500))
    found = assess([worker(0, segment(0)), worker(1, segment(1))], directory)
    assert (found.slot, found.old_world_size, found.held) == (None, 0, ())
    assert "of step 7 (epoch 1), but save 3 of step 500 (epoch 2)" in found.stale


@pytest.fixture
def memory_of(tmp_path):
    """Copies the memory of a dead worker, and brings it back later in place of all that is there then."""

    def keep():
        shutil.copytree(tmp_path / "memory", tmp_path / "kept", copy_function=shutil.copy2)

    def bring_back():
        shutil.rmtree(tmp_path / "memory")
        shutil.copytree(tmp_path / "kept", tmp_path / "memory")

    return keep, bring_back


def test_memory_that_others_have_left_behind_is_not_adopted(new_worker, memory_of, caplog):
    """Memory of step 12 returns when the run has saved step 20: no row of before is trained on again."""
    keep, bring_back = memory_of
    new_worker(restarted=False).restore().train(12).wait_for_save().die()
    keep()
    later = new_worker().restore().train(3).wait_for_save().train(5).wait_for_save()
    saved = later.values()
    later.train(3).die()
    bring_back()
    again = new_worker().restore()
    assert (again.story.kind, again.story.step, again.story.save_step) == ("full", 20, 20)
    assert "of step 12 (epoch 1), but save 3 of step 20 (epoch 2) was made after it" in again.story.reason
    assert "all workers go back to save 3 of step 20: live memory is of step 12" in caplog.text
    assert_same(again.values(), saved)
    assert again.recovery.pls == 0.0


def files_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_who_returns_to_a_run_that_has_finished_ends_with_exit_code_0_and_writes_nothing(
    new_worker, memory_of, tmp_path, caplog
):
    keep, bring_back = memory_of
    new_worker(restarted=False).restore().train(12).die()
    keep()
    last = new_worker().restore().train(8)
    with last.recovery:
        pass
    last.die()
    storage = open_storage(str(tmp_path / "checkpoint"))
    assert newest_owner(storage).finished == 20
    before = files_of(tmp_path / "checkpoint")
    bring_back()
    with pytest.raises(RunFinished) as end:
        new_worker()
    assert (end.value.code, end.value.step) == (0, 20)
    assert "finished at step 20: nothing is left to train" in caplog.text
    assert files_of(tmp_path / "checkpoint") == before


def test_a_new_launch_continues_with_a_finished_run_also_if_its_first_workers_die_early(
    new_worker, monkeypatch
):
    monkeypatch.setenv("CPR_LAUNCH", "first")
    first = new_worker(restarted=False).restore().train(7)
    with first.recovery:
        pass
    first.die()
    monkeypatch.setenv("CPR_LAUNCH", "second")
    new_worker(restarted=True).die()  # the first one died before it owned the directory
    more = new_worker(restarted=True).restore()
    assert (more.story.kind, more.story.step) == ("full", 7)
    more.train(1).die()
    again = new_worker().restore()
    assert (again.story.kind, again.story.step) == ("process", 8)


@pytest.fixture
def faulty(monkeypatch, tmp_path):
    """The checkpoint directory of all workers, to be broken."""
    storage = FaultyStorage(open_storage(str(tmp_path / "checkpoint")))
    for module in (checkpointer_module, cpr.session):
        monkeypatch.setattr(module, "open_storage", lambda _: storage)
    return storage


def test_a_restart_adopts_memory_though_nothing_can_be_written(new_worker, faulty, tmp_path, caplog):
    worker = new_worker(restarted=False).restore().train(7).wait_for_save()
    alive = worker.values()
    worker.die()
    faulty.fail("create", "", number=errno.ENOSPC, lasting=True)
    again = new_worker().restore()
    assert (again.story.kind, again.story.step) == ("process", 7)
    assert_same(again.values(), alive)
    assert caplog.text.count("Training continues from memory") == 1
    again.train(4).die()  # a save was due at step 10

    third = new_worker().restore()
    assert (third.story.kind, third.story.step) == ("process", 11)
    faulty.heal()
    third.train(4).wait_for_save()
    states, _ = find_states(faulty)
    assert states[0].step == 15
    third.die()
    fourth = new_worker().restore()
    assert (fourth.story.kind, fourth.story.step) == ("process", 15)


def test_a_run_that_could_not_write_is_refused_when_another_has_taken_the_directory_meanwhile(
    new_worker, faulty
):
    new_worker(restarted=False).restore().train(7).wait_for_save().die()
    faulty.fail("create", "", number=errno.EROFS, lasting=True)
    again = new_worker().restore()
    faulty.heal()
    taken = replace(newest_owner(faulty), epoch=5, token="0b", session="other", released=True)
    write_owner(faulty, taken)
    with pytest.raises(LockedError, match="has owned"):
        again.train(3)


def test_a_first_beginning_needs_storage_that_can_be_written(new_worker, faulty):
    faulty.fail("create", "", number=errno.EACCES, lasting=True)
    with pytest.raises(CheckpointError, match="Permission denied") as refused:
        new_worker(restarted=False).restore()
    assert not isinstance(refused.value, SaveFailedError)


def test_a_save_that_is_passed_over_in_a_partial_recovery_is_named(new_worker, tmp_path):
    """Rows that newer saves hold, but which are newer than the run, or damaged, come from an older one."""
    worker = new_worker(restarted=False).restore().train(12).wait_for_save()
    name = worker.recovery.checkpointer.shards[0].name
    (newest,) = (tmp_path / "checkpoint").glob(f"saves/00000001-1/{name}.arrow")
    newest.write_bytes(b"")
    state, _, passed_over = worker.recovery.checkpointer.load_shards([name], ahead_of=(12, False))
    assert (state.step, [each.sequence for each in passed_over]) == (5, [1])
    state, _, passed_over = worker.recovery.checkpointer.load_shards([name], ahead_of=(5, False))
    assert (state.step, "rows of step 10, and the model is at step 5" in passed_over[0].reason) == (5, True)


def test_a_recovery_that_did_not_finish_is_told_and_counted(new_worker, monkeypatch):
    new_worker(restarted=False).restore().train(7).die(RuntimeError("the first"))
    second = new_worker()
    with monkeypatch.context() as patch:
        patch.setattr(lineage.Checkpointer, "prepare", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            second.restore()
    second.die(error.value)
    third = new_worker().restore()
    stories = third.recovery.recoveries
    assert [(each.kind, each.finished) for each in stories] == [
        ("start", True),
        ("process", False),
        ("process", True),
    ]
    assert [each.dead[0].why for each in stories[1:]] == [
        "RuntimeError: the first",
        "ZeroDivisionError: division by zero",
    ]
    assert third.recovery._progress.newest_stories == stories[1:]
    assert "it did not finish" in str(stories[1])
    assert third.train(1).recovery.samples_done == 8 * BATCH
