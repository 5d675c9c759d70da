"""A survivor goes back to a step that all have, bit for bit, whatever it was doing."""

import pytest
import torch

from cpr.errors import NotEnoughMemoryError
from cpr.mirror import undo
from cpr.mirror.changed_rows import ChangedRows
from cpr.mirror.pieces import ShardRows
from cpr.mirror.undo import UNDO_STEPS, UndoLog, can_undo, go_back, reachable_steps
from tests.cpr.recovery.workers import assert_same


class Logged:
    """A worker that copies rows before they change, as it does with a mirror."""

    def __init__(self, new_worker, **options):
        self.worker = worker = new_worker(layout={"a": "tw", "b": "rw", "c": "dp"}, **options).restore()
        shards = [each for each in worker.recovery.checkpointer.shards if not each.replicated]
        self.segment = worker.recovery._memory.segment
        assert can_undo(self.segment, shards)
        self.log = UndoLog(self.segment, [ShardRows(each.columns) for each in shards], self.steps_done)
        self.rows = ChangedRows(worker.model, shards, self.log.copy)
        self.values = {self.steps_done: worker.values()}

    @property
    def steps_done(self):
        return self.worker.recovery.steps_done

    def train(self, steps):
        for _ in range(steps):
            self.worker.train(1)
            self.log.begin(self.steps_done + 1)
            self.values[self.steps_done] = self.worker.values()
        return self

    def die(self):
        self.rows.close()
        self.worker.die()


@pytest.fixture
def logged(new_worker):
    def make(**options):
        return Logged(new_worker, **options)

    return make


def restarted(new_worker):
    return new_worker(restarted=True, layout={"a": "tw", "b": "rw", "c": "dp"}).restore()


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_a_batch_that_was_interrupted_is_undone_and_trained_again(logged, new_worker, passes):
    made = logged().train(6)
    position = made.worker.position.next
    for _ in range(passes):
        made.worker.forward_backward()  # rows change in it; the position runs ahead
    made.die()
    again = restarted(new_worker)
    assert (again.story.kind, again.story.step, again.story.interrupted) == ("process", 6, False)
    assert_same(again.values(), made.values[6])
    assert again.position.next == position, "no batch is skipped"
    again.die()


def test_each_of_the_last_steps_can_be_reached_also_after_dying_on_the_way(logged, new_worker, monkeypatch):
    made = logged(save_every_steps=0).train(7)
    made.worker.forward_backward()
    assert reachable_steps(made.segment) == (7, 6, 5, 4)
    monkeypatch.setattr(undo, "_pieces", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # it dies before rows are written
        go_back(made.segment, 6)
    monkeypatch.undo()
    assert reachable_steps(made.segment) == (6, 5, 4)
    for step in (6, 5, 4):
        go_back(made.segment, step)
        live = made.worker.values()
        assert made.segment.replica.read()[0] == made.segment.status.step_finished == step
        for shard in made.worker.recovery.checkpointer.shards:
            for name in shard.columns if not shard.replicated else ():
                key = f"{shard.name}/{name}"
                assert torch.equal(live[key], made.values[step][key]), (step, key)
    made.die()
    again = restarted(new_worker)
    assert again.story.step == 4
    assert_same(again.values(), made.values[4])
    again.die()


def test_no_save_is_of_the_future(logged, new_worker):
    made = logged().train(5)
    made.worker.recovery.save_now()
    made.worker.forward_backward()
    go_back(made.segment, 5 - UNDO_STEPS + 1)
    made.die()
    again = restarted(new_worker)
    assert (again.story.kind, again.story.step) == ("full", 5)
    assert_same(again.values(), made.values[5])
    again.die()


def test_what_each_step_needs_is_claimed_before_mirrors_take_the_room(new_worker, monkeypatch):
    worker = new_worker(restarted=False).restore()
    replica = worker.recovery._memory.segment.replica

    def full(*_):
        raise NotEnoughMemoryError("1 MB of shared memory are needed")

    monkeypatch.setattr("cpr.resident.replica.grow_region", full)
    with pytest.raises(NotEnoughMemoryError):
        replica.keep(UNDO_STEPS)
    worker.train(3)
    assert sorted(replica.steps()) == [2, 3]
    monkeypatch.undo()
    replica.keep(UNDO_STEPS)
    monkeypatch.setattr("cpr.resident.replica.grow_region", full)
    assert sorted(worker.train(6).recovery._memory.segment.replica.steps()) == [5, 6, 7, 8, 9]
    monkeypatch.undo()
    worker.die()


def test_without_room_the_batch_is_skipped_as_without_a_log(logged, new_worker, monkeypatch, caplog):
    def full(*_):
        raise NotEnoughMemoryError("1 MB of shared memory are needed")

    made = logged().train(3)
    monkeypatch.setattr(undo._StepFile, "_enlarge", full)
    made.train(2)
    assert "1 MB of shared memory" in caplog.text
    made.worker.forward_backward()
    assert reachable_steps(made.segment) == ()
    made.die()
    again = restarted(new_worker)
    assert (again.story.step, again.story.interrupted) == (5, True)
    again.die()
