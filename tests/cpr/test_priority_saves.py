"""Row saves by priority through `PartialRecovery`, against an oracle that counts for itself."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

import cpr
from cpr.errors import SaveFailedError
from tests.cpr.recovery.workers import BATCH, ROWS, assert_same
from tests.cpr.shards import models

PRIORITISED = {"a", "b"}  # c is small, and saved whole
RATIO = 0.25
PRIORITY = cpr.PriorityConfig(scheme="mfu", ratio=RATIO, covering=0.8)


@pytest.fixture
def new_worker(new_worker):
    """Workers whose saves are due every 2 steps."""
    return partial(new_worker, save_every_steps=8, priority=PRIORITY)


class Oracle:
    """Each row as it was last saved, by counting lookups in the plainest way."""

    def __init__(self):
        self.counts = {name: [0] * rows for name, rows in ROWS.items()}
        self.saved = {}

    def look_up(self, number):
        batch = models.batch(number, BATCH, **ROWS)
        for name in ROWS:
            for row in batch[f"f_{name}"].values().tolist():
                self.counts[name][row] += 1

    def save_all(self, live):
        self.saved = live
        self.counts = {name: [0] * rows for name, rows in ROWS.items()}

    def save_rows(self, live):
        for key, column in live.items():
            rows = self.chosen(key.split("/")[0].rpartition(".")[2])
            self.saved[key][rows] = column[rows]
        for name in ROWS:
            for row in self.chosen(name):
                self.counts[name][row] = 0

    def chosen(self, name):
        counts = self.counts[name]
        if name not in PRIORITISED:
            return list(range(len(counts)))
        budget = -(-len(counts) // round(1 / RATIO))
        used = [row for row, count in enumerate(counts) if count]
        return sorted(used, key=lambda row: (-counts[row], row))[:budget]


def rows_of(worker):
    """Copies of all rows with their optimizer state."""
    return {
        f"{shard.name}/{name}": column.detach().clone()
        for shard in worker.recovery.checkpointer.shards
        for name, column in shard.columns.items()
    }


def train(worker, oracle, steps):
    """Each save is waited for, so that what a save holds is known."""
    for _ in range(steps):
        oracle.look_up(worker.position.next)
        worker.train(1).recovery.checkpointer.wait_until_idle()
        step = worker.recovery.steps_done
        if step == 2:
            oracle.save_all(rows_of(worker))
        elif step % 2 == 0:
            oracle.save_rows(rows_of(worker))


def chain_of(worker):
    return [manifest.kind for manifest in worker.recovery.checkpointer._history.committed]


def test_what_comes_back_is_each_row_as_it_was_last_saved(new_worker, wipe):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 11)
    assert chain_of(worker) == ["base", *["rows"] * 4]
    alive = rows_of(worker)
    worker.die()
    wipe()
    again = new_worker().restore()
    assert (again.story.kind, again.story.step) == ("full", 10)
    assert_same(rows_of(again), oracle.saved)
    assert any(not torch.equal(alive[key], saved) for key, saved in oracle.saved.items())


def test_counters_outlive_their_worker_and_row_saves_go_on(new_worker, wipe):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 5)
    worker.die()
    again = new_worker().restore()
    assert again.story.kind == "process"
    train(again, oracle, 6)
    assert chain_of(again)[-3:] == ["rows"] * 3
    again.die()
    wipe()
    assert_same(rows_of(new_worker().restore()), oracle.saved)


def test_after_everybody_went_back_all_counters_are_zero(new_worker, wipe):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 7)
    worker.die()
    wipe()
    again = new_worker().restore()
    oracle.counts = Oracle().counts
    train(again, oracle, 3)
    assert chain_of(again)[-1] == "rows"
    again.die()
    wipe()
    assert_same(rows_of(new_worker().restore()), oracle.saved)


def test_what_a_failed_save_held_keeps_its_priority(new_worker, wipe, caplog):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 3)
    write_all = worker.recovery.checkpointer._saver._write_all

    def fail(*_):
        raise OSError(28, "No space left on device")

    worker.recovery.checkpointer._saver._write_all = fail
    oracle.look_up(worker.position.next)
    worker.train(1)
    with pytest.raises(SaveFailedError, match="No space left"):
        worker.wait_for_save()
    worker.recovery.checkpointer._saver._write_all = write_all
    train(worker, oracle, 2)
    worker.die()
    wipe()
    again = new_worker().restore()
    assert again.story.step == 6
    assert_same(rows_of(again), oracle.saved)


def test_the_end_is_saved_whole(new_worker):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 5)
    values = rows_of(worker)
    worker.recovery.close()
    dist.destroy_process_group()
    later = new_worker(restarted=False).restore()
    assert (later.story.kind, later.story.step) == ("resume", 5)
    assert_same(rows_of(later), values)
    later.train(1).wait_for_save()
    assert chain_of(later)[-1] == "rows"  # on that base: all counters were zero


@pytest.mark.parametrize(
    "changed",
    [
        {"layout": {"a": "rw", "b": "tw", "c": "dp"}},
        {"priority": cpr.PriorityConfig(scheme="ssu", ratio=RATIO, covering=0.8)},
    ],
    ids=["another plan", "another tracker"],
)
def test_where_nobody_knows_what_has_changed_a_base_comes_first(new_worker, wipe, changed):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 5)
    worker.die()
    again = new_worker(**changed).restore()
    assert again.story.kind == "process"
    again.train(1).recovery.checkpointer.wait_until_idle()
    assert chain_of(again)[-1] == "base"
    again.train(2).wait_for_save()
    assert chain_of(again)[-1] == "rows"


def test_a_worker_that_dies_before_that_base_is_committed_leaves_the_same_doubt(new_worker):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 5)
    worker.die()
    other = {"layout": {"a": "rw", "b": "tw", "c": "dp"}}
    new_worker(**other).restore().die()
    again = new_worker(**other).restore()
    again.train(1).wait_for_save()
    assert chain_of(again)[-1] == "base"


def test_a_worker_that_dies_while_a_base_is_written_leaves_the_same_doubt(new_worker):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 5)
    worker.die()
    other = {"priority": cpr.PriorityConfig(scheme="ssu", ratio=RATIO, covering=0.8)}
    worker = new_worker(**other).restore()

    def fail(*_):
        raise OSError(28, "No space left on device")

    worker.recovery.checkpointer._saver._write_all = fail
    worker.train(1)  # its trackers are empty now, and the base that they were emptied for will not come
    assert worker.recovery.checkpointer.newest_step == 4
    worker.die()
    again = new_worker(**other).restore()
    assert again.story.kind == "process"
    again.train(2).recovery.checkpointer.wait_until_idle()
    assert chain_of(again)[-1] == "base"
