"""Row saves by priority through `PartialRecovery`, against an oracle that counts for itself."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType

import cpr
from cpr.errors import SaveFailedError
from cpr.saving import setup as save_plan
from cpr.saving.setup import settle_trackers
from tests.cpr.recovery.workers import BATCH, ROWS, assert_same
from tests.cpr.shards import models

pytestmark = pytest.mark.system

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


def advance(worker, steps):
    """Each save is waited for, and what it holds does not matter."""
    for _ in range(steps):
        worker.train(1).recovery.checkpointer.wait_until_idle()


def chain_of(worker):
    return [manifest.kind for manifest in worker.recovery.checkpointer._committer.committed]


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


def test_after_all_workers_went_back_all_counters_are_zero(new_worker, wipe):
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
    write_all = worker.recovery.checkpointer._writer._write_all

    def fail(*_):
        raise OSError(28, "No space left on device")

    worker.recovery.checkpointer._writer._write_all = fail
    oracle.look_up(worker.position.next)
    worker.train(1)
    with pytest.raises(SaveFailedError, match="No space left"):
        worker.wait_for_save()
    worker.recovery.checkpointer._writer._write_all = write_all
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
def test_where_changes_are_unknown_a_base_comes_first(new_worker, wipe, changed):
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

    worker.recovery.checkpointer._writer._write_all = fail
    worker.train(1)  # its trackers are empty now, and the base that they were emptied for will not come
    assert worker.recovery.checkpointer.newest_step == 4
    worker.die()
    again = new_worker(**other).restore()
    assert again.story.kind == "process"
    again.train(2).recovery.checkpointer.wait_until_idle()
    assert chain_of(again)[-1] == "base"


def samples_lost(worker):
    """That the run's PLS accounts for, of every shard."""
    return worker.recovery.pls * 100 * BATCH


def test_going_back_to_a_row_save_costs_what_its_rows_are_behind(new_worker, wipe):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 6)
    alive = rows_of(worker)
    worker.die()
    wipe()
    again = new_worker().restore()
    assert (again.story.kind, again.story.step) == ("full", 6)
    assert any(not torch.equal(alive[key], back) for key, back in rows_of(again).items())
    # the rows of step 2 were the last that were all saved, so that the work of 4 steps is lost in part
    assert samples_lost(again) == pytest.approx(4 * BATCH)
    assert again.story.pls_added == again.story.pls_total == again.recovery.pls
    train(again, oracle, 3)
    again.die()
    wipe()
    third = new_worker().restore()
    assert third.story.step == 8  # two steps after all rows were as they had been saved
    assert samples_lost(third) == pytest.approx(6 * BATCH)
    assert third.story.pls_added == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("steps", "kind", "lost"),
    [
        (8, "partial", 6),  # everybody who goes back to the save of that step loses as much
        (9, "full", 6),
        (11, "full", 0),
    ],
)
def test_all_workers_go_back_because_of_max_pls_only_where_that_loses_less(new_worker, steps, kind, lost):
    options = {
        "optimizer": torch.optim.Adagrad,
        "fused": EmbOptimType.EXACT_ADAGRAD,
        "apart": True,
        "policy": cpr.RecoveryPolicy(max_pls=0.001),
    }
    worker = new_worker(restarted=False, **options).restore()
    advance(worker, steps)
    worker.die()
    # table c was data-parallel, and so is in no segment
    again = new_worker(layout={"a": "tw", "b": "cw", "c": "tw"}, **options).restore()
    assert again.story.kind == kind
    assert samples_lost(again) == pytest.approx(lost * BATCH)
    (way_back,) = [way for way in again.story.ways if way.name == "full"]
    assert way_back.is_chosen == (kind == "full")
    assert way_back.pls == again.recovery.pls


def damage_manifest(tmp_path):
    """Of the newest save."""
    newest = max((tmp_path / "checkpoint" / "saves").iterdir()) / "manifest.json"
    newest.write_bytes(newest.read_bytes()[:-20])


def damage_rows(path):
    """One bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_trackers_that_count_from_a_damaged_save_are_not_believed(new_worker, wipe, tmp_path):
    oracle, worker = Oracle(), new_worker(restarted=False).restore()
    train(worker, oracle, 7)
    worker.die()
    damage_manifest(tmp_path)
    again = new_worker().restore()
    assert (again.story.kind, again.recovery.checkpointer.newest_step) == ("process", 4)
    again.die()  # the doubt is in the memory that it leaves
    again = new_worker().restore()
    again.train(1).recovery.checkpointer.wait_until_idle()
    assert chain_of(again)[-1] == "base"
    saved = rows_of(again)
    again.train(1).die()
    wipe()
    assert_same(rows_of(new_worker().restore()), saved)


def test_a_moment_whose_save_was_never_committed_does_not_count(new_worker):
    worker = new_worker(restarted=False).restore()
    advance(worker, 9)

    def fail(*_):
        raise OSError(28, "No space left on device")

    worker.recovery.checkpointer._writer._write_all = fail
    worker.train(1)  # whose save would make a whole table
    worker.die()
    again = new_worker().restore()
    progress = again.recovery._progress
    assert (again.recovery.checkpointer.newest_step, set(progress.saves)) == (8, {2})
    advance(again, 2)
    assert set(progress.saves) == {2, 12}  # the next one does instead


def test_one_damaged_base_is_replaced_when_merging_finds_it(new_worker, wipe, tmp_path, caplog):
    worker = new_worker(restarted=False).restore()
    advance(worker, 3)
    (entry, *_) = worker.recovery.checkpointer._committer.chain[0].rows
    damage_rows(tmp_path / "checkpoint/saves/00000000-1" / entry.path)
    for _ in range(40):
        if (save := worker.train(1).recovery.checkpointer._save) is not None:
            save.wait_until_over(60)
    assert sum("is damaged" in record.message for record in caplog.records) == 1
    assert worker.recovery.checkpointer.newest_step == 42
    alive = rows_of(worker)
    assert worker.recovery.save_now(60)
    worker.die()
    wipe()
    assert_same(rows_of(new_worker().restore()), alive)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_trackers_are_told_where_lost_rows_came_from_an_older_save_than_the_newest(
    new_worker, tmp_path, monkeypatch, is_damaged
):
    told = []

    def settle_and_note(*arguments):
        told.append(arguments[-1])
        settle_trackers(*arguments)

    monkeypatch.setattr(save_plan, "settle_trackers", settle_and_note)
    adagrad = {"optimizer": torch.optim.Adagrad, "fused": EmbOptimType.EXACT_ADAGRAD, "apart": True}
    worker = new_worker(restarted=False, **adagrad).restore()
    advance(worker, 3)
    assert worker.recovery.save_now(60)
    advance(worker, 2)
    assert chain_of(worker) == ["base", "base", "rows"]
    worker.die()
    if is_damaged:
        damage_rows(tmp_path / "checkpoint/saves/00000001-1/ebc.embedding_bags.c/r0-c0.arrow")
    # table c was data-parallel, and so is in no segment
    again = new_worker(layout={"a": "tw", "b": "cw", "c": "tw"}, **adagrad).restore()
    assert (again.story.kind, again.story.save_step) == ("partial", 2 if is_damaged else 4)
    assert again.recovery.checkpointer.newest_step == 4
    assert told == [False, is_damaged]
