"""An owner stands still in the middle of a write, and another takes its directory.

What of the first arrives late, as a request to an object store may, or only comes back late, changes nothing
of what the second has saved.
"""

import io
import threading
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from cpr.checkpoint import checkpointer as checkpointer_module
from cpr.checkpoint.catalog import ownership as ownership_module
from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.catalog.verify import verify
from cpr.checkpoint.ownership import lock as lock_module
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.ownership.records import OWNERS, epochs, newest_owner
from cpr.checkpoint.storage.base import open_storage
from cpr.errors import CheckpointError, LockedError, SaveFailedError
from tests.cpr.checkpoint.runs import assert_same

PATIENCE = timedelta(seconds=1)
LONGEST_PAUSE_S = 60.0
OF_SAVE_1 = "saves/00000001-1/"


class PausedMachine:
    """The storage of a machine that stands still in the middle of one write; nothing else passes."""

    def __init__(self, storage):
        self._storage, self.uri = storage, storage.uri
        self._late, self._before, self._is_dead = None, "request", False
        self.paused, self._awake, self._arrived = (threading.Event() for _ in range(3))
        self._awake.set()
        self._arrived.set()

    def pause_at(self, part, before="request"):
        """Stand still at the next file with this part of a path: before it is sent, or before the answer."""
        self._before, self._late = before, part

    def let_go(self, *, dead=False):
        """Wake up, or be dead: then the late write alone arrives."""
        self._is_dead = dead
        self._awake.set()
        assert self._arrived.wait(LONGEST_PAUSE_S)

    @contextmanager
    def create(self, path):
        content = io.BytesIO()
        yield content
        self._pass()
        is_late = self._late is not None and self._late in path
        if is_late:
            self._late = None
            self._awake.clear()
            self._arrived.clear()
        if is_late and self._before == "request":
            self._stand_still()
        with self._storage.create(path) as sink:
            sink.write(content.getbuffer())
        if is_late and self._before == "answer":
            self._stand_still()
        if is_late:
            self._arrived.set()
            self._pass()

    def __getattr__(self, name):
        def call(*arguments):
            self._pass()
            return getattr(self._storage, name)(*arguments)

        return call

    def _stand_still(self):
        self.paused.set()
        assert self._awake.wait(LONGEST_PAUSE_S)

    def _pass(self):
        assert self._awake.wait(LONGEST_PAUSE_S)
        assert self._arrived.wait(LONGEST_PAUSE_S)
        if self._is_dead:
            raise CheckpointError(f"the machine before {self.uri} is dead")


@pytest.fixture
def runs(start, tmp_path, monkeypatch):
    """Runs of a first owner, which has taken the directory, and of two others; its machine; the directory."""
    monkeypatch.setattr(ownership_module, "DirectoryLock", partial(DirectoryLock, patience=PATIENCE))
    storage = open_storage(str(tmp_path / "checkpoint"))
    machine = PausedMachine(storage)
    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "_place", lambda: "another machine")
        patch.setattr(checkpointer_module, "open_storage", lambda _: machine)
        first = start()
        first.checkpointer.claim()
    yield first, start(), start(), machine, storage
    machine.let_go(dead=True)


def contents(storage):
    """All files of a directory but what its owner renews."""
    root = Path(storage.uri)
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.glob("saves/**/*.*") if path.is_file()
    }


def take_over(second):
    """A second owner loads what is there, saves, and finishes."""
    second.checkpointer.claim()
    second.checkpointer.load()
    second.save(5)
    second.save(1)
    second.checkpointer.finish()


@pytest.mark.parametrize(
    ("late", "is_dead"),
    [
        (f"{OF_SAVE_1}manifest.json", False),
        (f"{OF_SAVE_1}manifest.json", True),
        (f"{OF_SAVE_1}ebc", False),
        (f"{OWNERS}/00000001", True),
    ],
    ids=["manifest", "manifest of the dead", "rows", "renewal of the dead"],
)
def test_late_requests_of_a_replaced_owner_change_nothing(runs, late, is_dead):
    first, second, third, machine, storage = runs
    first.save(1)
    machine.pause_at(late)
    first.train(1)
    if late.startswith(OWNERS):
        assert machine.paused.wait(30)
    first.checkpointer.save("consistent")
    assert machine.paused.wait(30)

    take_over(second)
    saved, before = second.values(), contents(storage)
    machine.let_go(dead=is_dead)
    with pytest.raises(SaveFailedError, match=r"save 1 to .* failed on rank 0"):
        first.checkpointer.wait_until_idle()
    after = contents(storage)
    assert {path: after.get(path) for path in before} == before
    assert all(path.startswith(OF_SAVE_1) for path in after.keys() - before.keys())

    states, rejected = find_states(storage)
    assert [(state.step, state.newest.epoch) for state in states] == [(7, 2), (6, 2)]
    assert all(each.unfinished for each in rejected)
    checked = verify(storage)
    assert (checked.bad, checked.newest.step) == ([], 7)
    assert (newest_owner(storage).epoch, newest_owner(storage).finished) == (2, 7)

    second.checkpointer.close()
    assert third.checkpointer.load().state.step == 7
    assert_same(third.values(), saved)
    third.save(1)
    assert not any(path.startswith(OF_SAVE_1) for path in contents(storage))
    assert [epoch for epoch, _ in epochs(storage)] == [3]


def test_a_replaced_owner_keeps_a_save_that_the_new_owner_found(runs):
    """Its manifest is there, and its owner is paused before it receives the answer."""
    first, second, _, machine, storage = runs
    first.save(1)
    machine.pause_at(f"{OF_SAVE_1}manifest.json", before="answer")
    first.train(1)
    first.checkpointer.save("consistent")
    saved = first.values()
    assert machine.paused.wait(30)

    second.checkpointer.claim()
    assert second.checkpointer.load().state.step == 2
    assert_same(second.values(), saved)
    second.train(1)
    second.checkpointer.save_rows({})
    second.checkpointer.wait_until_idle()
    before = contents(storage)
    machine.let_go()
    with pytest.raises(SaveFailedError):
        first.checkpointer.wait_until_idle()
    assert contents(storage) == before
    states, rejected = find_states(storage)
    assert [state.step for state in states] == [3, 2, 1]
    assert not rejected
    with pytest.raises((LockedError, SaveFailedError)):
        first.save(1)
