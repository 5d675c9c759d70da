"""Storages with faults fail at their operation, and are transparent otherwise."""

import errno
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpr.checkpoint.storage.base import read_file
from cpr.checkpoint.storage.local import LocalStorage
from cpr.errors import CheckpointError, CorruptFileError
from cpr.faults import FaultyStorage, StorageOutage


def write(storage, path="file", data=b"content"):
    with storage.create(path) as sink:
        sink.write(memoryview(data))


@pytest.mark.parametrize(
    ("operation", "act"),
    [
        ("create", write),
        ("write", write),
        ("commit", write),
        ("committed", write),
        ("read", lambda storage: read_file(storage, "there")),
        ("size", lambda storage: read_file(storage, "there")),
        ("list", lambda storage: list(storage.list())),
        ("delete", lambda storage: storage.delete("there")),
    ],
)
def test_each_operation_fails_once_like_a_real_one(tmp_path, operation, act):
    storage = FaultyStorage(LocalStorage(tmp_path))
    write(storage, "there")
    storage.fail(operation, number=errno.EIO)
    with pytest.raises(CheckpointError, match="Input/output error") as caught:
        act(storage)
    assert isinstance(caught.value, CorruptFileError) == (operation in {"read", "size"})
    assert (tmp_path / "file").exists() == (operation == "committed")
    act(storage)


@given(at=st.integers(1, 9), lasting=st.booleans())
def test_nth_operation_fails_and_later_ones_if_lasting_until_healed(at, lasting):
    storage = FaultyStorage(LocalStorage("/nowhere"))
    storage.fail("write", "table", at=at, lasting=lasting)
    failed = {}
    for number in range(1, 11):
        storage.before("read", "table")
        storage.before("write", "state")
        try:
            storage.before("write", "saves/table/r0")
        except CheckpointError as error:
            failed[number] = str(error)
    assert list(failed) == (list(range(at, 11)) if lasting else [at])
    assert "No space left" in failed[at]
    storage.heal()
    storage.before("write", "saves/table/r0")


@pytest.mark.parametrize("reads", [False, True])
def test_operations_fail_during_an_outage(tmp_path, monkeypatch, reads):
    now = 1000.0
    monkeypatch.setattr(time, "time", lambda: now)
    storage = FaultyStorage(LocalStorage(tmp_path))
    write(storage, "there")
    storage.out(StorageOutage(reads=reads, error="ETIMEDOUT"), until=1060.0)
    changes = [lambda: write(storage), lambda: storage.delete("there")]
    looks = [lambda: read_file(storage, "there"), lambda: list(storage.list())]
    for act in changes + looks * reads:
        with pytest.raises(CheckpointError, match="timed out"):
            act()
    for act in looks * (not reads):
        act()
    now = 1060.0
    for act in looks + changes:
        act()


def test_operations_hang_until_the_end_of_an_outage(tmp_path, monkeypatch):
    now = 1000.0
    slept = []

    def sleep(seconds):
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(time, "time", lambda: now)
    monkeypatch.setattr(time, "sleep", sleep)
    storage = FaultyStorage(LocalStorage(tmp_path))
    storage.out(StorageOutage(how="hang"), until=1030.0)
    write(storage)
    assert slept == [30.0]
    assert read_file(storage, "file") == b"content"
