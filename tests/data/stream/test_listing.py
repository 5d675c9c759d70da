"""Which files of a folder are found: outages, links, odd names and times."""

import os
from pathlib import Path

import pytest

from data.jobs.location import Location
from data.stream.listing import PATIENCE_S, SETTLE_S, WarnOnce
from data.stream.source import Place
from tests.data.stream.folders import drain, open_folder, write


def test_when_a_folder_is_quiet(tmp_path, clock, caplog):
    stream, places = open_folder(tmp_path / "in", clock)
    assert stream.fetch(places, 10) is None
    assert not stream.is_quiet, "it is not there"
    assert "in is not there: looking again" in caplog.text
    path = write(tmp_path / "in" / "1.parquet", range(10))
    os.utime(path, (clock.now_s, clock.now_s))
    clock.now_s += 2
    assert stream.fetch(places, 10) is None
    assert not stream.is_quiet, "a file is about to be read"
    clock.now_s += 2
    drain(stream, places)
    assert stream.is_quiet
    with pytest.raises(ValueError, match=r"is a file: name the folder"):
        open_folder(path, clock)


@pytest.mark.parametrize("is_empty", [False, True], ids=["renamed", "unmounted"])
def test_a_folder_that_is_away_for_a_while_loses_nothing(tmp_path, clock, caplog, is_empty):
    folder, away = tmp_path / "in", tmp_path / "away"
    for number in range(3):
        write(folder / f"{number}.parquet", range(10 * number, 10 * number + 10), age_s=90 - number)
    stream, places = open_folder(folder, clock)
    first = stream.fetch(places, 1000)
    places[first.partition] = Place(first.begin.unit, first.end)
    folder.rename(away)
    if is_empty:
        folder.mkdir()
    for _ in range(100):
        assert stream.fetch(places, 1000) is None
        clock.now_s += 5
    assert not is_empty or "in has no files any more, and not all of them have been read: l" in caplog.text
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 20
    if is_empty:
        folder.rmdir()
    away.rename(folder)
    clock.now_s += 2
    assert drain(stream, places) == (list(range(10, 30)), {})
    assert "was deleted" not in caplog.text


def test_a_part_of_the_folder_that_is_away_for_a_moment_loses_nothing(tmp_path, clock, caplog):
    folder, part = tmp_path / "in", tmp_path / "part"
    write(folder / "1.parquet", range(10))
    write(part / "2.parquet", range(10, 20), age_s=90)
    (folder / "linked").symlink_to(part)
    stream, places = open_folder(folder, clock)
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 20
    part.rename(tmp_path / "away")
    assert drain(stream, places) == (list(range(10)), {})
    clock.now_s += PATIENCE_S / 2
    assert drain(stream, places) == ([], {})
    (tmp_path / "away").rename(part)
    clock.now_s += PATIENCE_S
    assert drain(stream, places) == (list(range(10, 20)), {})
    first, second = caplog.messages
    assert first.endswith("linked is a link to what is not there now, and is read when it is")
    assert second.endswith("linked/2.parquet is not there now: waiting for it, a minute at most")


def test_a_folder_that_this_user_may_not_list_keeps_no_other_from_being_read(
    tmp_path, clock, monkeypatch, caplog
):
    write(tmp_path / "1.parquet", range(10))
    write(tmp_path / "lost+found" / "2.parquet", range(10, 20))
    scandir = os.scandir

    def refuse(path):
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr("data.stream.listing.os.scandir", refuse)
    stream, places = open_folder(tmp_path, clock)
    assert drain(stream, places) == (list(range(10)), {})
    assert "lost+found/ is not read, as this user may not list it" in caplog.text


def test_links_that_make_circles_are_left(tmp_path, clock):
    folder = tmp_path / "in"
    write(folder / "a" / "1.parquet", range(10))
    one, other = tmp_path / "one", tmp_path / "other"
    write(one / "2.parquet", range(10, 20))
    write(other / "3.parquet", range(20, 30))
    links = {
        "self": ".",
        "a/up": "..",
        "b": "c",
        "c": "b",
        "a/far": tmp_path,
        one / "o": other,
        other / "o": one,
    }
    for path, target in links.items():
        (folder / path).symlink_to(target)
    stream, places = open_folder(folder, clock)
    ids, bad = drain(stream, places)
    # by `far`, the other two folders have two names each, and each is what a user has linked
    assert (sorted(ids), bad) == (sorted([*range(10), *2 * [*range(10, 30)]]), {})


def test_links_to_files_of_the_folder_are_not_read_twice_and_others_are(tmp_path, clock, caplog):
    folder, outside = tmp_path / "in", tmp_path / "other"
    write(folder / "sub" / "1.parquet", range(10))
    write(folder / ".staged" / "2.parquet", range(10, 20))
    write(outside / "3.parquet", range(20, 30))
    (folder / "loop").symlink_to(".")
    (folder / "same.parquet").symlink_to("sub/1.parquet")
    (folder / "2.parquet").symlink_to(".staged/2.parquet")
    (folder / "linked").symlink_to(outside)
    (tmp_path / "by link").symlink_to(folder)
    for name in (folder, tmp_path / "by link"):
        stream, places = open_folder(name, clock)
        ids, bad = drain(stream, places)
        assert (sorted(ids), bad) == (list(range(30)), {})
        clock.now_s += 2
        assert drain(stream, places) == ([], {})
    assert caplog.text.count("in has links to what is in it, which is read once, under its own name") == 1


def test_of_many_warnings_alike_some_are_logged(caplog):
    warn = WarnOnce()
    for number in range(150):
        for _ in range(2):
            warn(Location.of(f"in/{number}"), "is odd")
    said = [message.split(" is odd") for message in caplog.messages]
    assert [place for place, _ in said] == [f"in/{number}" for number in [*range(10), 99]]
    assert [more for _, more in said] == [
        *[""] * 9,
        " (one of 10 alike so far)",
        " (one of 100 alike so far)",
    ]


def test_a_name_that_is_no_text_is_told_and_passed_over(tmp_path, clock, caplog):
    write(tmp_path / "1.parquet", range(10))
    odd = os.fsencode(tmp_path) + b"/bad\xff.parquet"
    Path(os.fsdecode(odd)).write_bytes(b"")
    stream, places = open_folder(tmp_path, clock)
    assert drain(stream, places) == (list(range(10)), {})
    assert "has a file that is not read, as its name is not UTF-8: b'" in caplog.text
    assert "bad\\xff" in caplog.text


def test_a_file_from_the_future_is_named_and_keeps_no_run_waiting(tmp_path, clock, caplog):
    write(tmp_path / "1.parquet", range(10))
    write(tmp_path / "2.parquet", range(10, 20), age_s=-3600)
    write(tmp_path / "3.parquet", range(20, 30), age_s=-PATIENCE_S / 2)
    stream, places = open_folder(tmp_path, clock)
    assert drain(stream, places)[0] == list(range(10))
    assert not stream.is_quiet, "the clock of a store may be ahead"
    clock.now_s += PATIENCE_S / 2 + SETTLE_S
    assert drain(stream, places)[0] == list(range(20, 30))
    assert stream.is_quiet
    (said,) = [each for each in caplog.messages if "2.parquet" in each]
    assert "has a time in the future, and is not read until then: give it the present one (`touch`)" in said
    clock.now_s += 3600
    assert drain(stream, places)[0] == list(range(10, 20))
