"""What cannot be read now costs no live memory: whichever system call fails, it is kept and found again."""

import errno
import fcntl
import json
import mmap
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from cpr.errors import DamagedMemoryError, MemoryVersionError, UnreadableMemoryError
from cpr.resident import regions
from cpr.resident.layout import FORMAT, LAYOUT_FILE
from cpr.resident.regions import map_region, patiently
from cpr.resident.replica import MAGIC_BYTES
from cpr.resident.status_page import VERSION, WORDS
from tests.cpr.resident.shards import RUN, assert_same, make_shard

CALLS = (
    *((os, name) for name in ("open", "fstat", "pread", "fdopen")),
    *((Path, name) for name in ("lstat", "iterdir")),
    (fcntl, "flock"),
    (mmap, "mmap"),
    (torch, "from_file"),
)
PASSING = [errno.ENOMEM, errno.EMFILE, errno.EIO]


@pytest.fixture(autouse=True)
def no_patience(monkeypatch):
    monkeypatch.setattr(regions, "PATIENCE_S", 0.0)


@pytest.fixture
def segment(home):
    """Of a worker that died after its third step."""
    segment = home.create("rank1")
    segment.seal(**RUN, shards=[make_shard(segment)])
    segment.replica.write(3, {"a": torch.ones(5)})
    segment.release()
    return segment


class Failing:
    """Lets one of the calls of `CALLS` fail, and counts them."""

    def __init__(self, nth, code):
        self.nth, self.code, self.count, self.failed = nth, code, 0, None

    @contextmanager
    def on(self):
        with pytest.MonkeyPatch.context() as patch:
            for module, name in CALLS:
                patch.setattr(module, name, self._wrap(name, getattr(module, name)))
            yield self

    def _wrap(self, name, call):
        def wrapper(*args, **kwargs):
            if name == "flock" and args[1] == fcntl.LOCK_UN:  # never fails
                return call(*args, **kwargs)
            self.count += 1
            if self.count - 1 != self.nth:
                return call(*args, **kwargs)
            self.failed = name
            said = os.strerror(self.code)
            # PyTorch knows no OSError
            raise RuntimeError(said) if name == "from_file" else OSError(self.code, said)

        return wrapper


def read_all(home):
    """All that a worker reads of the memory of the one before."""
    found, refused = home.find()
    assert refused == []
    (found,) = found
    try:
        assert found.claim()
        step, tree = found.replica.read()
        assert (step, tree["a"].tolist()) == (3, [1.0] * 5)
        assert_same([make_shard()], found.held_shards())
    finally:
        found.release()


def contents(home):
    return {path: path.read_bytes() for path in home.folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("code", PASSING)
def test_whichever_call_fails_memory_is_kept_and_found_afterwards(home, segment, code):
    with Failing(None, code).on() as calls:
        read_all(home)
    before, failed = contents(home), set()
    for nth in range(calls.count):
        with Failing(nth, code).on() as failing, pytest.raises(UnreadableMemoryError, match="is kept"):
            read_all(home)
        failed.add(failing.failed)
        assert contents(home) == before, failing.failed
    assert failed == {name for _, name in CALLS}
    read_all(home)


def test_a_lack_of_memory_for_a_copy_is_no_damage(home, segment, monkeypatch):
    (found,), _ = home.find()

    def clone(_tensor):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", clone)
        with pytest.raises(UnreadableMemoryError, match="can't allocate memory"):
            found.replica.read()
    assert found.replica.read()[0] == 3


def of_other_marks(segment):
    segment.status._words[WORDS.index("version")] = VERSION + 1


def of_longer_marks(segment):
    of_other_marks(segment)
    os.truncate(segment.folder / "marks", 8192)


def of_other_layout(segment):
    path = segment.folder / LAYOUT_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": "cpr-resident 99"}))


@pytest.mark.parametrize(
    ("become", "said"),
    [
        (of_other_marks, f"format {VERSION + 1} instead of {VERSION}"),
        (of_longer_marks, f"format {VERSION + 1} instead of {VERSION}"),
        (of_other_layout, f"format cpr-resident 99 instead of {FORMAT}"),
    ],
)
def test_memory_of_another_version_is_kept(home, segment, become, said):
    become(segment)
    with pytest.raises(MemoryVersionError, match=rf"another version of cpr \({said}\), and is kept"):
        home.find()
    assert segment.folder.exists()


def test_a_replicated_state_of_another_version_is_kept(home, segment):
    (path,) = segment.folder.glob("replica-*")
    path.write_bytes(MAGIC_BYTES[:-1] + b"9" + path.read_bytes()[8:])
    with pytest.raises(MemoryVersionError, match="CPRSLOT9"):
        segment.replica.read()


def test_what_can_be_read_after_a_while_is_read(monkeypatch, caplog):
    monkeypatch.setattr(regions, "PATIENCE_S", 60.0)
    monkeypatch.setattr(regions, "FIRST_PAUSE_S", 0.001)
    failures = [OSError(errno.EMFILE, "Too many open files")] * 3

    def read():
        if failures:
            raise UnreadableMemoryError("later") from failures.pop()
        return 7

    assert patiently(read) == 7
    (said,) = caplog.messages
    assert "Too many open files" in said


@pytest.mark.parametrize("error", [MemoryVersionError, DamagedMemoryError])
def test_what_waiting_does_not_mend_is_told_at_once(monkeypatch, error):
    monkeypatch.setattr(regions, "PATIENCE_S", 60.0)
    calls = []

    def read():
        calls.append(1)
        raise error("for good")

    with pytest.raises(error, match="for good"):
        patiently(read)
    assert len(calls) == 1


def test_a_region_that_is_missing_is_damage(tmp_path):
    with pytest.raises(DamagedMemoryError):
        map_region(tmp_path / "gone.memory")
