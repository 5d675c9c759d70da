"""The lock of a folder on a store: live owners keep it, dead ones lose it."""

import threading
import time

import pytest

from data.jobs import store_lock
from data.jobs.folder import locked
from data.jobs.location import Location
from data.jobs.store_lock import LOCK_NAME


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    for name, seconds in {"PATIENCE_S": 1.0, "BEAT_S": 0.1, "SETTLE_S": 0.2}.items():
        monkeypatch.setattr(store_lock, name, seconds)


@pytest.fixture
def out(tmp_path):
    return Location.of(f"mock://{tmp_path}")


def test_a_live_owner_keeps_the_folder_and_leaves_nothing(out, capsys):
    with locked(out), pytest.raises(ValueError, match=r"in use by process \d+ on .*another --out"):
        locked(out).__enter__()
    assert "is locked by process" in capsys.readouterr().err
    assert out.names() == []
    with locked(out):
        pass


def test_the_folder_of_a_dead_owner_is_taken_over(out):
    store_lock._write(out / LOCK_NAME, "dead", 7)
    with locked(out):
        assert store_lock._read(out / LOCK_NAME)["token"] != "dead"
    assert out.names() == []


def test_an_owner_that_was_replaced_leaves_its_successor_alone(out):
    with locked(out):
        store_lock._write(out / LOCK_NAME, "successor", 0)
        time.sleep(3 * store_lock.BEAT_S)
    left = store_lock._read(out / LOCK_NAME)
    assert (left["token"], left["beat"]) == ("successor", 0)


def test_of_two_that_begin_at_once_one_gives_way(out):
    held, refused = [], []

    def begin():
        try:
            with locked(out):
                held.append(1)
                time.sleep(1)
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=begin) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(held), len(refused)) == (1, 1)
