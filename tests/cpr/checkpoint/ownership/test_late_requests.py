"""An owner is paused in the middle of a request to an object store, and another takes its directory.

What of the first arrives late, or only comes back late, changes nothing of what the second has saved.
"""

from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
from pyarrow.fs import FileSelector

from cpr.checkpoint.catalog import ownership as ownership_module
from cpr.checkpoint.catalog.chain import find_states
from cpr.checkpoint.catalog.verify import verify
from cpr.checkpoint.ownership import lock as lock_module
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.ownership.records import OWNERS, epochs, newest_owner
from cpr.checkpoint.storage.base import open_storage, read_file
from cpr.errors import LockedError, SaveFailedError
from tests.cpr.checkpoint.ownership.delays import delaying
from tests.cpr.checkpoint.runs import assert_same

PATIENCE = timedelta(seconds=1)
OF_SAVE_1 = "saves/00000001-1/"


@pytest.fixture
def proxy(s3):
    """Between the first owner, on another machine than the others, and the store."""
    with delaying(s3.port) as proxy:
        yield proxy


@pytest.fixture
def runs(s3, proxy, start, request, monkeypatch):
    """Runs of a first owner, which has taken the directory, and of two others; and the directory.

    All are made at once, because pyarrow opens no file system while a request of another one is paused.
    """
    monkeypatch.setattr(ownership_module, "DirectoryLock", partial(DirectoryLock, patience=PATIENCE))
    path = f"bucket/{request.node.name}".replace(" ", "-")
    first = start(replace(s3, port=proxy.port).uri(path))
    with monkeypatch.context() as patch:
        patch.setattr(lock_module, "_place", lambda: "another machine")
        first.checkpointer.claim()
    return first, start(s3.uri(path)), start(s3.uri(path)), open_storage(s3.uri(path))


def contents(storage):
    """All files of a directory but what its owner renews."""
    found = storage._system.get_file_info(FileSelector(storage._root, recursive=True))
    paths = [info.path.removeprefix(f"{storage._root}/") for info in found if info.is_file]
    return {path: read_file(storage, path) for path in paths if not path.startswith(OWNERS)}


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
def test_late_requests_of_a_replaced_owner_change_nothing(runs, proxy, late, is_dead):
    first, second, third, storage = runs
    first.save(1)
    proxy.pause_at("PUT", late)
    first.train(1)
    if late.startswith(OWNERS):
        assert proxy.paused.wait(30)
    first.checkpointer.save("consistent")
    assert proxy.paused.wait(30)

    take_over(second)
    saved, before = second.values(), contents(storage)
    proxy.let_go(dead=is_dead)
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


def test_a_replaced_owner_keeps_a_save_that_the_new_owner_found(runs, proxy):
    """Its manifest is there, and its owner is paused before it receives the answer."""
    first, second, _, storage = runs
    first.save(1)
    proxy.pause_at("PUT", f"{OF_SAVE_1}manifest.json", before="answer")
    first.train(1)
    first.checkpointer.save("consistent")
    saved = first.values()
    assert proxy.paused.wait(30)

    second.checkpointer.claim()
    assert second.checkpointer.load().state.step == 2
    assert_same(second.values(), saved)
    second.train(1)
    second.checkpointer.save_rows({})
    second.checkpointer.wait_until_idle()
    before = contents(storage)
    proxy.let_go()
    with pytest.raises(SaveFailedError):
        first.checkpointer.wait_until_idle()
    assert contents(storage) == before
    states, rejected = find_states(storage)
    assert [state.step for state in states] == [3, 2, 1]
    assert not rejected
    with pytest.raises((LockedError, SaveFailedError)):
        first.save(1)
