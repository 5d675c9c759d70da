"""Rows of dynamic tables are recovered with their ids, from resident memory and from saves."""

import shutil

import pytest
import torch
import torch.distributed as dist

import cpr
from tests.cpr.recovery.workers import Worker, assert_same
from tests.dlrm.sharding.dynamic.models import build, columns_of, contents, raw_ids, train

pytestmark = pytest.mark.system

CAPACITY, ADMIT_AFTER = 32, 2


class DynamicWorker(Worker):
    """A worker whose model has a dynamic table."""

    def __init__(self, folder, memory, **options):
        self.recovery = cpr.PartialRecovery(str(folder), resident_root=str(memory), **options)
        self.recovery.init_process_group("gloo")
        with self.recovery.building():
            self.model, self.table = build(CAPACITY, ADMIT_AFTER)
        self.optimizers, self.done = [], {"next": 0}
        self.history = {}

    def state_dict(self):
        return self.done

    def load_state_dict(self, state):
        self.done = dict(state)

    def restore(self):
        self.story = self.recovery.restore(self.model, optimizers=[], states={"position": self})
        return self

    def train(self, steps):
        for _ in range(steps):
            train(self.model, [self.done["next"]])
            self.done["next"] += 1
            for each, content in contents(self.model).items():
                self.history.setdefault(each, set()).add(content)
            self.recovery.step(samples=8)
        return self


@pytest.fixture
def new_worker(tmp_path, monkeypatch):
    """Makes workers, one at a time; the last one is killed at the end."""
    (tmp_path / "memory").mkdir()
    workers = []

    def make(restarted=True, **options):
        monkeypatch.setenv("CPR_CONTINUES", "1" if restarted else "0")
        workers.append(
            DynamicWorker(
                tmp_path / "checkpoint",
                tmp_path / "memory",
                total_samples=800,
                moment="consistent",
                **{"save_every_steps": 5, **options},
            )
        )
        return workers[-1]

    yield make
    if dist.is_initialized():
        workers[-1].die()


@pytest.fixture
def wipe(tmp_path):
    """Loses the memory of dead workers, as a lost node does."""

    def work():
        for folder in (tmp_path / "memory").glob("*/*/*"):
            if folder.is_dir():
                shutil.rmtree(folder)

    return work


def test_a_restarted_worker_continues_identically(new_worker):
    worker = new_worker(restarted=False).restore().train(12)
    alive = columns_of(worker.model)
    worker.die()
    again = new_worker().restore()
    assert (again.story.kind, again.story.step, again.story.bytes_read) == ("process", 12, 0)
    assert_same(columns_of(again.model), alive)
    again.train(6)
    unbroken, _ = build(CAPACITY, ADMIT_AFTER)
    train(unbroken, range(18))
    assert_same(columns_of(again.model), columns_of(unbroken))


@pytest.mark.parametrize("scheme", ["mfu", "ssu", "scar"])
def test_rows_saved_at_different_steps_are_consistent_each(new_worker, wipe, scheme):
    options = {
        "save_every_steps": 8,
        "priority": cpr.PriorityConfig(scheme=scheme, ratio=0.25, covering=0.6),
    }
    worker = new_worker(restarted=False, **options).restore()
    for _ in range(21):  # a save every other step, of which each is waited for
        worker.train(1).recovery.checkpointer.wait_until_idle()
    worker.die()
    wipe()
    again = new_worker(**options).restore()
    assert again.story.step == 20
    again.table.find(raw_ids(torch.arange(1)))
    found = contents(again.model)
    assert len(found) > CAPACITY // 4
    newest = contents(worker.model)
    for each, content in found.items():
        assert content in worker.history[each]
    assert any(newest.get(each) != content for each, content in found.items())
    again.train(3)
    assert again.table.num_ids == len(contents(again.model)) <= CAPACITY
