"""The lock: other runs are refused while the owner lives, and a replaced owner notices it."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from cpr.checkpoint.ownership import lock as lock_module
from cpr.checkpoint.ownership.lock import DirectoryLock
from cpr.checkpoint.ownership.records import OWNERS, Claimant, Owner, fence, newest_owner, write_owner
from cpr.checkpoint.storage.base import Storage, open_storage
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import AlreadyFinishedError, CheckpointError, LockedError, SupersededError
from cpr.faults.storages import FaultyStorage
from cpr.processes import Process
from tests.cpr.checkpoint.saves import manifest_path

REPO = Path(__file__).parents[4]
SHORT = timedelta(seconds=0.1)
LONG = timedelta(hours=1)


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


def put_foreign(storage: Storage, make_lock: Callable[..., DirectoryLock]) -> Owner:
    """The record of a process on another machine."""
    lock = make_lock(storage, "far")
    lock.acquire(list)
    lock.release()
    owner = replace(newest(storage), place="another boot", host="far-host", beat_s=0.03, released=False)
    write_owner(storage, owner)
    return owner


def newest(storage: Storage) -> Owner:
    owner = newest_owner(storage)
    assert owner is not None
    return owner


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_second_is_refused_at_once(storage, make_lock):
    make_lock(storage, "first").acquire(list)
    second = make_lock(storage, "second")
    with pytest.raises(LockedError) as error:
        second.acquire(list)
    for word in (storage.uri, "'first'", str(os.getpid()), "What to do"):
        assert word in str(error.value)


def test_a_released_directory_can_be_taken(storage, make_lock):
    first, second = make_lock(storage, "first"), make_lock(storage, "second")
    first.acquire(list)
    first.release()
    assert newest(storage).released
    second.acquire(list)
    second.check()
    first.release()
    second.check()
    assert second.epoch == first.epoch + 1


NO_PID = 2**22 + 1
"""No process of this number runs here; in another container one may."""


@pytest.mark.parametrize(
    ("holder", "least_s"),
    [
        ({}, 0.1),
        ({"beat_s": 0.1}, 3 * 0.1),  # one that renews its record rarely gets more time
        ({"place": f"{lock_module._place().split()[0]} pid:[1]", "pid": NO_PID}, 0.1),
    ],
    ids=["another machine", "rare renewals", "another container"],
)
def test_a_silent_owner_elsewhere_is_replaced_after_watching_it(storage, make_lock, caplog, holder, least_s):
    write_owner(storage, replace(put_foreign(storage, make_lock), **holder))
    lock = make_lock(storage, "new", SHORT)
    begin = time.monotonic()
    lock.acquire(list)
    assert time.monotonic() - begin >= least_s
    assert newest(storage).run == "new"
    assert "taking" in caplog.text
    assert "far-host" in caplog.text


def test_a_live_owner_on_another_machine_is_respected(storage, make_lock):
    holder = put_foreign(storage, make_lock)
    stop = threading.Event()

    def beat() -> None:
        beats = 0
        while not stop.wait(0.05):
            beats += 1
            write_owner(storage, replace(holder, beat=holder.beat + beats))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(LockedError, match=r"'far' .* on far-host"):
            make_lock(storage, "new", timedelta(seconds=5)).acquire(list)
    finally:
        stop.set()
        thread.join()


def test_a_later_process_with_the_same_pid_is_not_the_owner(storage, make_lock):
    lock = make_lock(storage, "old")
    lock.acquire(list)
    write_owner(storage, replace(newest(storage), started=1))
    make_lock(storage, "new").acquire(list)  # at once: its patience is an hour


FORGED = b'{"epoch": 7, "token": "0badf00d", "run": "", "host": "", "place": "", "started": 0, %s}'


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"not json\n", b"[1]", b"[" * 100_000),
        *(FORGED % b'"pid": -1', FORGED % b'"pid": 1, "beat_s": 1e300', FORGED % b'"pid": 1, "beat_s": NaN'),
        *(FORGED % b'"pid": 1, "accepted": [[1]]', FORGED % b'"pid": 1, "finished": "7"'),
    ],
)
def test_an_unreadable_record_still_has_its_epoch(storage, make_lock, data, caplog):
    with storage.create("owners/00000007-0badf00d.json") as sink:
        sink.write(memoryview(data))
    lock = make_lock(storage, "new", SHORT)
    lock.acquire(list)
    assert lock.epoch == 8
    assert "owners/00000007-0badf00d.json" in caplog.text


def test_epochs_grow_after_records_were_deleted(storage, make_lock):
    lock = make_lock(storage, "first")
    lock.acquire(list)
    with storage.create(manifest_path(0, lock.epoch)) as sink:
        sink.write(memoryview(b"{}"))
    storage.delete("owners")
    again = make_lock(storage, "second")
    again.acquire(list)
    assert again.epoch == lock.epoch + 1


def test_a_paused_owner_learns_that_it_was_replaced(storage, make_lock, caplog):
    old = make_lock(storage, "old", SHORT)
    old.acquire(list)
    other = replace(newest(storage), epoch=old.epoch + 1, run="other", token="abc", host="far-host")
    write_owner(storage, other)
    with pytest.raises(LockedError, match=r"no longer belongs to run 'old'.*'other'.*far-host"):
        old.check()
    wait_for(lambda: not old._thread.is_alive())
    with pytest.raises(LockedError):
        old.finish(1)
    old.release()
    assert newest(storage) == other, "the loser changed a record that is not its own"
    assert "could not be released" in caplog.text


def test_a_new_owner_lists_saves_once_older_owners_cannot_commit(storage, make_lock):
    """What lands between the two would pass for the older owner's, and be fenced off."""
    old, new = make_lock(storage, "old"), make_lock(storage, "new")
    old.acquire(list)
    old._own = replace(old._own, released=True)
    write_owner(storage, old._own)

    def committed() -> list[tuple[int, int]]:
        with pytest.raises(LockedError):
            old.check()
        return [(4, old.epoch)]

    new.acquire(committed)
    assert new.previous == old._own
    assert fence(storage).counts(4, old.epoch)
    assert fence(storage).counts(5, new.epoch)
    assert not fence(storage).counts(5, old.epoch)


def test_a_run_that_dies_while_claiming_fences_nothing(storage, make_lock):
    first, dying = make_lock(storage, "first"), make_lock(storage, "dying")
    first.acquire(lambda: [(1, 0)])
    first.release()

    def die() -> list[tuple[int, int]]:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        dying.acquire(die)
    assert newest(storage).run == "dying"
    assert fence(storage).run == "first"
    assert fence(storage).counts(2, first.epoch)


def test_a_deleted_record_is_written_again_if_the_directory_is_free(storage, make_lock):
    lock = make_lock(storage, "run", timedelta(seconds=1))
    lock.acquire(list)
    storage.delete("owners")
    with pytest.raises(LockedError, match=r"owners/00000001-\w+\.json is gone .* put it back"):
        lock.check()
    wait_for(lambda: newest_owner(storage) is not None)
    lock.check()


def test_an_owner_with_a_deleted_record_can_be_replaced_in_the_same_epoch(storage, make_lock):
    old, new = make_lock(storage, "old"), make_lock(storage, "new")
    old.acquire(list)
    storage.delete("owners")
    new.acquire(list)
    assert new.epoch == old.epoch
    with pytest.raises(SupersededError, match="'new'"):
        old.check()
    new.check()


def test_storage_that_fails_for_a_while_does_not_lose_the_lock(storage, make_lock, caplog):
    faulty = FaultyStorage(storage)
    lock = make_lock(faulty, "run", SHORT)
    lock.acquire(list)
    faulty.fail("write", OWNERS, at=1)
    wait_for(lambda: "will try again" in caplog.text)
    assert "No space left on device" in caplog.text
    beat = newest(storage).beat
    wait_for(lambda: newest(storage).beat > beat)
    lock.check()


def test_a_directory_that_cannot_be_written(storage, make_lock):
    with pytest.raises(CheckpointError, match=r"owners/.* failed: No space"):
        make_lock(FaultyStorage(storage).fail("create", OWNERS), "run").acquire(list)


def test_of_many_concurrent_claims_one_wins(storage, make_lock, caplog):
    caplog.set_level(logging.CRITICAL)
    put_foreign(storage, make_lock)
    together, outcomes = threading.Barrier(6), []

    def work(i: int) -> None:
        lock = make_lock(storage, f"run-{i}", SHORT)
        together.wait(30)
        try:
            lock.acquire(list)
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


def test_a_claim_with_a_late_record_is_refused(storage, make_lock):
    """No store can prevent it: A looks, sleeps, and writes its record when B has become the owner."""
    slow, fast = make_lock(storage, "slow"), make_lock(storage, "fast")
    really_write = slow._write

    def write_late(**changes: object) -> None:
        slow._write = really_write
        fast.acquire(list)
        really_write(**changes)

    slow._write = write_late
    with pytest.raises(LockedError, match="in use by run 'fast'"):
        slow.acquire(list)
    fast.check()


OWNER = """
import sys, time
from datetime import timedelta
from cpr.checkpoint.storage.local import LocalStorage
from cpr.checkpoint.ownership.lock import DirectoryLock

DirectoryLock(LocalStorage(sys.argv[1]), "dying").acquire(list)
print("mine", flush=True)
time.sleep(60)
"""


@pytest.mark.system
@pytest.mark.timeout(60)
def test_a_killed_owner_on_this_machine_is_replaced_at_once(storage, make_lock):
    command = [sys.executable, "-c", OWNER, storage.uri]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPO) as owner:
        assert owner.stdout.readline() == "mine\n"
        with pytest.raises(LockedError, match=f"'dying' .process {owner.pid} on"):
            make_lock(storage, "new").acquire(list)
        owner.send_signal(signal.SIGSTOP)
        with pytest.raises(LockedError, match="'dying'"):
            make_lock(storage, "new").acquire(list)
        owner.kill()
        # Not waited for yet: what is left of it in the process table is not alive.
        wait_for(lambda: Process.find(owner.pid) is None)
        make_lock(storage, "new").acquire(list)  # its patience is an hour
        assert newest(storage).run == "new"


def test_a_newer_generation_of_the_session_takes_over_at_once(storage):
    first = DirectoryLock(storage, "first", LONG, claimant=Claimant(session="s", generation=3))
    first.acquire(list)
    write_owner(storage, replace(newest(storage), place="another boot", host="far-host"))
    next_one = DirectoryLock(storage, "next", LONG, claimant=Claimant(session="s", generation=4))
    next_one.acquire(list)
    assert newest(storage).run == "next"
    with pytest.raises(LockedError, match="no longer belongs"):
        first.check()
    first.release()
    next_one.check()
    next_one.release()


@pytest.mark.parametrize(("session", "generation"), [("t", 4), ("s", 3), ("s", 2)])
def test_other_sessions_and_older_generations_are_refused(storage, session, generation):
    """Two halves of a run that were cut apart may both begin generation 3: the first stays the owner."""
    first = DirectoryLock(storage, "first", LONG, claimant=Claimant(session="s", generation=3))
    first.acquire(list)
    claimant = Claimant(session=session, generation=generation)
    with pytest.raises(LockedError, match="in use"):
        DirectoryLock(storage, "other", SHORT, claimant=claimant).acquire(list)
    first.check()
    first.release()


def test_launches_are_recorded_until_another_run_starts(storage):
    def take(launch: str, continues: bool | None) -> tuple[str, ...]:
        lock = DirectoryLock(storage, launch)
        lock.acquire(list)
        if continues is not None:
            lock.note_launches([launch], continues=continues)
        lock.release()
        return newest(storage).launches

    assert take("a", continues=False) == ("a",)
    assert take("b", continues=True) == ("a", "b")
    assert take("c", continues=None) == ("a", "b")
    assert take("d", continues=False) == ("d",)


def test_a_run_that_finishes_while_its_process_is_looked_for_is_not_taken(tmp_path, monkeypatch):
    storage = open_storage(str(tmp_path))
    first = DirectoryLock(storage, "first")
    first.acquire(list)
    late = DirectoryLock(storage, "late", takes_finished=lambda owner: owner.run != "first")

    def finish_meanwhile(holder):
        if holder.finished is None:
            first.finish(30)
            first.release()

    monkeypatch.setattr(late, "_refuse_if_alive", finish_meanwhile)
    with pytest.raises(AlreadyFinishedError) as refused:
        late.acquire(list)
    assert refused.value.step == 30
    assert newest_owner(storage).finished == 30
    other = DirectoryLock(storage, "other")
    other.acquire(list)
    assert other.epoch == first.epoch + 1
    other.release()
