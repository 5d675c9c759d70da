"""The check of the checkpoint directory by one node, with fakes for storage that is not consistent."""

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from cpr.checkpoint.storage.local import LocalStorage
from cpr.doctor import storage
from cpr.doctor.storage import check_storage, mount_of, no_new_folders


def test_a_directory_needs_room_for_the_tables(tmp_path):
    assert check_storage(str(tmp_path), 1).state == "ok"
    found = check_storage(str(tmp_path), 10**18)
    assert found.state == "warning"
    assert "free. What to do: make room for a save of all tables" in found.text


def test_a_full_file_system_is_told_without_the_size_of_the_tables(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_frsize=1, f_bavail=10**7))
    found = check_storage(str(tmp_path))
    assert found.state == "warning"
    assert "10 MB free. What to do: make room" in found.text


def test_a_new_folder_is_named_with_its_mount_point_and_one_without_a_parent_is_suspected(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(storage, "mount_of", lambda path: ("/disk", "ext4"))
    assert "exist" not in check_storage(str(tmp_path)).text
    found = check_storage(str(tmp_path / "new"))
    assert found.state == "ok"
    assert "does not exist yet, and would be on what is mounted at /disk" in found.text
    found = check_storage(f"file://{tmp_path}/not/here/run")
    assert found.state == "warning"
    assert (
        f"mounted at /disk. What to do: look whether {tmp_path}/not is misspelt, or not mounted" in found.text
    )


def test_what_was_made_is_removed_unless_it_is_used(tmp_path):
    for uri, used in ((tmp_path / "a/b", False), (tmp_path / "c/d", True), (tmp_path / "not/made", None)):
        with no_new_folders(str(uri)):
            if used is not None:
                check_storage(str(uri))
            if used:
                (uri.parent / "other").touch()
    with no_new_folders("s3://bucket/prefix"), no_new_folders(None):
        pass
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "c", tmp_path / "c/other"]


def test_a_mount_point_is_the_innermost():
    assert mount_of(Path("/")) == mount_of(Path("/no/such/folder"))
    assert mount_of(Path("/dev/shm/not/here"))[0] == "/dev/shm"


def test_a_uri_that_no_storage_has_is_a_finding():
    assert check_storage("nothing://here").state == "PROBLEM"
    assert "names no bucket: write s3://BUCKET" in check_storage("s3://").text


class Stale(LocalStorage):
    """Lists and reads nothing new."""

    def list(self, folder=""):
        return iter(())


class Partial(LocalStorage):
    """An interrupted write leaves what it has written."""

    @contextmanager
    def create(self, path):
        try:
            with super().create(path) as sink:
                yield sink
        except InterruptedError:
            (self._root / path).write_bytes(b"half")
            raise


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (LocalStorage, "seen at once"),
        (Stale, "is not seen at once. What to do"),
        (Partial, "an interrupted write has replaced a file"),
    ],
)
def test_storage_keeps_what_ownership_relies_on(tmp_path, monkeypatch, kind, words):
    monkeypatch.setattr(storage, "open_storage", kind)
    found = check_storage(str(tmp_path))
    assert words in found.text
    assert found.state == ("ok" if kind is LocalStorage else "PROBLEM")
    assert not list(tmp_path.iterdir())


def test_storage_that_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").touch()
    found = check_storage(str(tmp_path / "file"))
    assert found.state == "PROBLEM"
    assert "What to do: a file stands where a folder is needed" in found.text
