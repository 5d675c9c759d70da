"""One run to a directory: refused while its owner lives, taken over when it does not, noticed when it was."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cpr.checkpoint import lock as lock_module
from cpr.checkpoint.local import LocalStorage
from cpr.checkpoint.lock import LOCK_PATH, DirectoryLock, Holder
from cpr.checkpoint.storage import Sink, Storage, open_storage
from cpr.errors import CheckpointError, LockedError
from cpr.faults.storages import FaultyStorage, WrappedStorage
from cpr.processes import Process

REPO = Path(__file__).parents[3]
SHORT = timedelta(seconds=0.1)
LONG = timedelta(hours=1)


class Unguarded(WrappedStorage):
    """A storage that cannot keep others out, like an object store."""

    def alone(self) -> AbstractContextManager[bool]:
        return nullcontext(False)


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(tmp_path)


@pytest.fixture
def make_lock() -> Iterator[Callable[..., DirectoryLock]]:
    locks = []

    def make(storage: Storage, owner: str, patience: timedelta = LONG) -> DirectoryLock:
        locks.append(DirectoryLock(storage, owner, patience))
        return locks[-1]

    yield make
    for lock in locks:
        lock.release()


def holder_of(storage: Storage) -> Holder:
    data = bytearray(storage.size(LOCK_PATH))
    storage.read_into(LOCK_PATH, 0, memoryview(data))
    holder = Holder.from_bytes(bytes(data))
    assert holder is not None
    return holder


def put(storage: Storage, data: bytes) -> None:
    with storage.create(LOCK_PATH) as sink:
        sink.write(memoryview(data))


def put_foreign(storage: Storage, make_lock: Callable[..., DirectoryLock], beat_s: float = 0.03) -> Holder:
    """The lock of a process on another machine."""
    lock = make_lock(storage, "far")
    lock.acquire()
    holder = replace(holder_of(storage), token="of-far", place="another boot", host="far-host", beat_s=beat_s)
    lock.release()
    put(storage, holder.to_bytes())
    return holder


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_second_is_refused_at_once(storage, make_lock):
    make_lock(storage, "first").acquire()
    second = make_lock(storage, "second")
    with pytest.raises(LockedError) as error:
        second.acquire()
    for word in (storage.uri, "'first'", str(os.getpid()), "What to do"):
        assert word in str(error.value)


def test_free_again_after_release(storage, make_lock):
    first, second = make_lock(storage, "first"), make_lock(storage, "second")
    first.acquire()
    first.release()
    assert list(storage.list()) == []
    second.acquire()
    second.check()
    first.release()
    second.check()


def test_renewed_while_it_is_held(storage, make_lock):
    lock = make_lock(storage, "run", SHORT)
    lock.acquire()
    beat = holder_of(storage).beat
    wait_for(lambda: holder_of(storage).beat >= beat + 2)
    lock.check()


def test_an_owner_elsewhere_that_is_silent_is_taken_over(storage, make_lock, caplog):
    put_foreign(storage, make_lock)
    lock = make_lock(storage, "new", SHORT)
    begin = time.monotonic()
    lock.acquire()
    assert time.monotonic() - begin >= SHORT.total_seconds()
    assert holder_of(storage).owner == "new"
    assert "taking" in caplog.text
    assert "far-host" in caplog.text


def test_an_owner_elsewhere_that_beats_is_respected(storage, make_lock):
    holder = put_foreign(storage, make_lock)
    stop = threading.Event()

    def beat() -> None:
        beats = 0
        while not stop.wait(0.05):
            beats += 1
            put(storage, replace(holder, beat=holder.beat + beats).to_bytes())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LockedError, match=r"'far' .* on far-host"):
            make_lock(storage, "new", timedelta(seconds=5)).acquire()
    finally:
        stop.set()
        thread.join()


def test_patience_grows_with_the_owners_interval(storage, make_lock):
    put_foreign(storage, make_lock, beat_s=0.1)
    begin = time.monotonic()
    make_lock(storage, "new", timedelta(seconds=0.03)).acquire()
    assert time.monotonic() - begin >= 3 * 0.1


def test_the_same_number_in_another_container_is_somebody_else(storage, make_lock):
    """No process of this number runs here, but there one may: it must be watched, not judged."""
    boot = holder_of_new(storage, make_lock).place.split()[0]
    there = replace(put_foreign(storage, make_lock), place=f"{boot} pid:[1]", pid=2**22 + 1)
    put(storage, there.to_bytes())
    begin = time.monotonic()
    make_lock(storage, "new", SHORT).acquire()
    assert time.monotonic() - begin >= SHORT.total_seconds()


def holder_of_new(storage: Storage, make_lock: Callable[..., DirectoryLock]) -> Holder:
    lock = make_lock(storage, "new")
    lock.acquire()
    holder = holder_of(storage)
    lock.release()
    return holder


def test_a_later_process_of_the_same_number_does_not_count(storage, make_lock):
    holder = holder_of_new(storage, make_lock)
    put(storage, replace(holder, started=holder.started - 1).to_bytes())
    make_lock(storage, "new").acquire()  # at once: its patience is an hour


@pytest.mark.parametrize("data", [b"", b"{}", b"not json\n", b"[1]"])
def test_a_lock_that_nobody_can_read_is_watched(storage, make_lock, data):
    put(storage, data)
    make_lock(storage, "new", SHORT).acquire()
    assert holder_of(storage).owner == "new"


def test_an_owner_that_was_asleep_learns_that_it_lost(storage, make_lock, caplog):
    old = make_lock(storage, "old", SHORT)
    old.acquire()
    other = replace(holder_of(storage), owner="other", token="x", host="far-host")
    put(storage, other.to_bytes())
    with pytest.raises(LockedError, match=r"no longer belongs to run 'old'.*'other'.*far-host"):
        old.check()
    wait_for(lambda: not old._thread.is_alive())
    old.release()
    assert holder_of(storage) == other, "the loser renewed or deleted a lock that is not its own"
    assert "could not be released" in caplog.text


def test_a_deleted_lock_is_a_lost_lock(storage, make_lock):
    lock = make_lock(storage, "run")
    lock.acquire()
    storage.delete(LOCK_PATH)
    with pytest.raises(LockedError, match="nobody holds its LOCK"):
        lock.check()


def test_storage_that_fails_for_a_while_does_not_lose_the_lock(storage, make_lock, caplog):
    faulty = FaultyStorage(storage)
    lock = make_lock(faulty, "run", SHORT)
    lock.acquire()
    faulty.fail("write", LOCK_PATH, at=1)
    wait_for(lambda: "will try again" in caplog.text)
    assert "No space left on device" in caplog.text
    beat = holder_of(storage).beat
    wait_for(lambda: holder_of(storage).beat > beat)
    lock.check()


def test_a_directory_that_cannot_be_written(storage, make_lock):
    with pytest.raises(CheckpointError, match="LOCK failed: No space"):
        make_lock(FaultyStorage(storage).fail("create", LOCK_PATH), "run").acquire()


def test_a_run_id_that_is_too_long(storage):
    with pytest.raises(ValueError, match="too long"):
        DirectoryLock(storage, "x" * 600)


@pytest.mark.parametrize("guarded", [True, False])
def test_many_newcomers_one_owner(storage, make_lock, guarded, monkeypatch, caplog):
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(lock_module, "SETTLE_S", 0.3)
    put_foreign(storage, make_lock)
    together, outcomes = threading.Barrier(6), []

    def work(i: int) -> None:
        lock = make_lock(storage if guarded else Unguarded(storage), f"run-{i}", SHORT)
        together.wait(30)
        try:
            lock.acquire()
            outcomes.append(lock)
        except LockedError:
            outcomes.append(None)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    owners = [lock for lock in outcomes if lock is not None]
    assert len(outcomes) == 6
    assert len(owners) == 1
    owners[0].check()


def test_a_newcomer_waits_for_others_that_looked_when_it_did(storage, make_lock, monkeypatch):
    monkeypatch.setattr(lock_module, "SETTLE_S", 0.5)
    other = replace(holder_of_new(storage, make_lock), owner="other", token="x")

    class Late(Unguarded):
        @contextmanager
        def create(self, path: str) -> Iterator[Sink]:
            with super().create(path) as sink:
                yield sink
            threading.Timer(0.1, put, (storage, other.to_bytes())).start()

    with pytest.raises(LockedError, match="'other'"):
        make_lock(Late(storage), "new").acquire()


def test_a_newcomer_that_was_slow_to_write_takes_over_but_only_one_may_commit(
    storage, make_lock, monkeypatch
):
    """What an object store cannot prevent: A looks, sleeps, and writes after B has become the owner."""
    monkeypatch.setattr(lock_module, "SETTLE_S", 0.01)
    slow, fast = make_lock(Unguarded(storage), "slow"), make_lock(Unguarded(storage), "fast")
    really_write = slow._write

    def write_late() -> None:
        fast.acquire()
        fast.check()
        really_write()

    monkeypatch.setattr(slow, "_write", write_late)
    slow.acquire()
    monkeypatch.setattr(slow, "_write", really_write)
    slow.check()
    with pytest.raises(LockedError):
        fast.check()


def test_on_s3(s3, make_lock, monkeypatch):
    monkeypatch.setattr(lock_module, "SETTLE_S", 0.05)
    storage = open_storage(s3.uri("bucket/lock"))
    first = make_lock(storage, "first", SHORT)
    first.acquire()
    beat = holder_of(storage).beat
    wait_for(lambda: holder_of(storage).beat > beat)
    with pytest.raises(LockedError, match="s3://bucket/lock is in use by run 'first'"):
        make_lock(storage, "second").acquire()
    first.release()
    assert list(storage.list()) == []


OWNER = """
import sys, time
from datetime import timedelta
from cpr.checkpoint.local import LocalStorage
from cpr.checkpoint.lock import DirectoryLock

DirectoryLock(LocalStorage(sys.argv[1]), "dying").acquire()
print("mine", flush=True)
time.sleep(60)
"""


@pytest.mark.system
@pytest.mark.timeout(60)
def test_a_killed_owner_on_this_machine_is_followed_at_once(storage, make_lock):
    command = [sys.executable, "-c", OWNER, storage.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO) as owner:
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(LockedError, match=f"'dying' .process {owner.pid} on"):
            make_lock(storage, "new").acquire()
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(LockedError, match="'dying'"):
            make_lock(storage, "new").acquire()
        owner.kill()
        # Not waited for yet: what is left of it in the process table is not alive.
        wait_for(lambda: Process.find(owner.pid) is None)
        make_lock(storage, "new").acquire()  # its patience is an hour
        assert holder_of(storage).owner == "new"


def test_within_a_session_it_is_handed_on_at_once_from_anywhere(storage):
    first = DirectoryLock(storage, "first", LONG, session="s")
    first.acquire()
    put(storage, replace(holder_of(storage), place="another boot", host="far-host").to_bytes())
    with pytest.raises(LockedError, match="in use"):  # alive, for all that a stranger on its machine knows
        DirectoryLock(storage, "stranger", SHORT, session="t")._refuse_if_alive(
            replace(holder_of(storage), place=lock_module._place()).to_bytes()
        )
    next_one = DirectoryLock(storage, "next", LONG, session="s")
    next_one.acquire()
    assert holder_of(storage).owner == "next"
    with pytest.raises(LockedError, match="no longer belongs"):
        first.check()
    first.release()
    next_one.check()
    next_one.release()


def test_a_lock_of_nobodys_session_is_not_handed_on(storage, make_lock):
    make_lock(storage, "first").acquire()
    with pytest.raises(LockedError):
        make_lock(storage, "second").acquire()
