"""Files and folders, wherever they lie."""

import pickle
from contextlib import suppress
from itertools import count

import pytest

from data.jobs.files import durable_file, remove_leftovers
from data.jobs.location import Location

_NUMBERS = count()


@pytest.fixture(params=["local", "file", "mock"])
def folder(request, tmp_path):
    """On the local disk by path and by URI, and on a store that shows unfinished files."""
    roots = {"local": tmp_path, "file": f"file://{tmp_path}", "mock": f"mock:///folder-{next(_NUMBERS)}"}
    return Location.of(roots[request.param]) / "out"


def write(location, content):
    with durable_file(location) as sink:
        sink.write(content)


def test_what_is_written_is_found_read_and_deleted(folder):
    assert (folder.size(), folder.names(), folder.sizes()) == (None, [], {})
    write(folder / "day=0" / "part", b"0123456789")
    write(folder / "a", b"")
    write(folder / "a", b"new")
    assert folder.names() == ["a", "day=0"]
    assert folder.sizes() == {"a": 3, "day=0/part": 10}
    part = folder / "day=0/part"
    assert (part.name, part.size(), part.read(), (folder / "none").size()) == (
        "part",
        10,
        b"0123456789",
        None,
    )
    with part.open() as stream:
        stream.seek(7)
        assert (stream.read(2), stream.read()) == (b"78", b"9")
    (folder / "a").delete()
    (folder / "day=0").delete_folder()
    (folder / "day=0").delete_folder()
    assert folder.names() == []


def test_a_failed_write_leaves_what_was_there(folder):
    write(folder / "file", b"old")
    with suppress(KeyError), durable_file(folder / "file") as sink:
        sink.write(b"new")
        raise KeyError
    assert folder.sizes() == {"file": 3}
    write(folder / "file.0.tmp", b"of a killed process")
    remove_leftovers(folder)
    assert folder.names() == ["file"]


def test_a_missing_file_is_told_apart(folder):
    with pytest.raises(FileNotFoundError):
        (folder / "none").read()


def test_a_location_travels_and_shows_no_password():
    location = Location.of("s3://key:secret@bucket/folder/?region=x") / "day=0" / "part"
    assert pickle.loads(pickle.dumps(location)) == location
    assert str(location) == "s3://bucket/folder/day=0/part"
    assert str(Location.of("relative/") / "a") == "relative/a"
