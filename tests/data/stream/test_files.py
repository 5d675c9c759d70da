"""Files that change, go, or cannot be read: each record once, or in a count."""

import os
from unittest.mock import Mock

import pytest

from data.dataset import read_manifest
from data.jobs.location import Location
from data.stream.agreement import PartitionState
from data.stream.files import FileReader
from data.stream.folder import FolderStream
from data.stream.listing import PATIENCE_S
from data.stream.source import START, Place
from data.stream.units import Unit
from tests.data.stream.folders import (
    NOW_S,
    drain,
    open_folder,
    restarted,
    same_partition,
    write,
    write_labels,
)
from tests.data.stream.streams import MANIFEST, ids_of


def test_a_file_that_grows_after_it_was_read_is_told(tmp_path, clock, caplog):
    write(tmp_path / "one.parquet", range(10))
    stream, places = open_folder(tmp_path, clock)
    drain(stream, places)
    write(tmp_path / "one.parquet", range(20), age_s=50)
    clock.now_s += 2
    assert drain(stream, places) == (list(range(20)), {})
    assert "one.parquet has changed since it was found: all its records count as new" in caplog.text


def test_a_file_that_is_gone_before_it_was_read(tmp_path, clock, caplog):
    write(tmp_path / "1.parquet", range(10), age_s=90)
    gone = write(tmp_path / "2.parquet", range(10, 20), age_s=80)
    write(tmp_path / "3.parquet", range(20, 30), age_s=70)
    stream, places = open_folder(tmp_path, clock)
    first = stream.fetch(places, 1000)
    places[first.partition] = Place(first.begin.unit, first.end)
    gone.unlink()
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 20
    assert drain(stream, places) == ([], {}), "its storage may be away"
    clock.now_s += PATIENCE_S
    assert drain(stream, places) == (list(range(20, 30)), {}), "of no bad records, but of such that are gone"
    assert "2.parquet was deleted, renamed or replaced before all of it was read" in caplog.text
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 0


@pytest.mark.parametrize("num_new", [3000, 9000])
@pytest.mark.parametrize("num_read", [0, 1000, 4000])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_file_that_is_replaced_before_it_was_read_is_trained_once(
    tmp_path, clock, caplog, monkeypatch, raw_dataset, num_new, num_read, ending
):
    """By another one of any length: none of its records is read in the place of the old ones."""
    monkeypatch.setattr("data.stream.files.BLOCK_BYTES", 4000)
    path = write_labels(tmp_path / f"in.{ending}", 5000, label=0)
    (tmp_path / "in").mkdir()
    path = path.rename(tmp_path / "in" / path.name)
    os.utime(path, (NOW_S - 100, NOW_S - 100))
    manifest = MANIFEST if ending == "parquet" else read_manifest(raw_dataset)
    stream = FolderStream(
        str(tmp_path / "in"), manifest, raw_dataset, is_encoded=ending == "parquet", now=clock
    )
    places = dict.fromkeys(stream.partitions, START)
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 5000
    counted, labels = {True: 0, False: 0}, {True: [], False: []}

    def read():
        """Read once, and count by whether a file is the new one."""
        fetched = stream.fetch(places, 1000)
        if fetched is None:
            return False
        places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
        assert not fetched.checked.bad
        is_new = int(fetched.begin.unit[:20]) == (NOW_S - 50) * 1e9
        counted[is_new] += fetched.end - fetched.begin.record
        if fetched.checked.rows is not None:
            labels[is_new] += fetched.checked.rows.label.values.tolist()
        return True

    while counted[False] < num_read:
        read()
    other = write_labels(tmp_path / f"other.{ending}", num_new, label=1)
    os.utime(other, (NOW_S - 50, NOW_S - 50))
    other.rename(path)
    clock.now_s += 0.5  # the folder is not listed again before the next read
    for _ in range(2):
        while read():
            pass
        clock.now_s += 2
    assert counted == {True: num_new, False: 5000}
    assert labels[True] == [1.0] * num_new
    assert set(labels[False]) <= {0.0}
    is_left_out = len(labels[False]) < 5000
    assert is_left_out == ("was deleted, renamed or replaced before all of it was read" in caplog.text)
    assert is_left_out or num_read == 4000, "of which a whole row group was read ahead"


def test_another_file_with_the_same_time_is_no_silent_loss(tmp_path, clock):
    write(tmp_path / "1.parquet", range(1000))
    stream, places = open_folder(tmp_path, clock)
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 1000
    write(tmp_path / "1.parquet", range(500))
    ids, bad = drain(stream, places)
    assert (ids, len(bad)) == ([], 1000)
    assert "fewer records than were found" in bad[0]


def test_times_of_a_store_are_compared_by_the_second(tmp_path, monkeypatch):
    """S3-compatible stores list milliseconds, and tell whole seconds of a single file."""
    path = write(tmp_path / "1.parquet", range(10))
    reader = FileReader(Location.of(tmp_path), Mock(), is_criteo=False)
    unit = Unit(int(NOW_S - 100) * 10**9 + 410_000_000, path.name).name
    assert reader.is_gone(unit)
    monkeypatch.setattr(Location, "local", None)
    assert not reader.is_gone(unit)
    os.utime(path, (NOW_S - 99, NOW_S - 99))
    assert reader.is_gone(unit)


def broken_for_once(monkeypatch, path, error):
    """The next reads of a file fail, once each in pieces and in blocks."""
    whole = FileReader.pieces, FileReader._blocks, FileReader._group
    left = [error, error, error]

    def fails(which):
        def read(self, *arguments):
            if any(path in str(each) for each in arguments) and left[which] is not None:
                error, left[which] = left[which], None
                raise error
            return whole[which](self, *arguments)

        return read

    for which, name in enumerate(("pieces", "_blocks", "_group")):
        monkeypatch.setattr(FileReader, name, fails(which))


@pytest.mark.parametrize("error", [OSError(5, "EIO"), FileNotFoundError(2, "gone")])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_an_error_of_storage_for_a_moment_loses_nothing(
    tmp_path, clock, monkeypatch, caplog, raw_dataset, ending, error
):
    """The older file fails when it is found and when it is read, and the newer one does not overtake it."""
    first, second = same_partition(2, ending)
    (tmp_path / "in").mkdir()
    for name, age_s in ((first, 100), (second, 90)):
        path = write_labels(tmp_path / "in" / name, 1000, label=0)
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    states: dict[str, PartitionState] = {}
    for reads in (4, 12):  # with a restart between, in the middle of a file
        with monkeypatch.context() as patch:
            broken_for_once(patch, first, error)
            states = restarted(
                tmp_path / "in",
                clock,
                states,
                chunk=300,
                reads=reads,
                dataset=raw_dataset if ending == "jsonl" else None,
                pause_s=2,
            )
    (state,) = states.values()
    assert (state.trained, state.left_out, state.bad) == (2000, 0, 0)
    assert f"{first} cannot be read, and is tried again" in caplog.text


def test_a_file_that_stays_unreadable_is_counted_though_others_keep_coming(
    tmp_path, clock, monkeypatch, caplog
):
    write(tmp_path / "0.parquet", range(10), age_s=100)
    stream, places = open_folder(tmp_path, clock)
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 10
    group = FileReader._group

    def fails(self, unit, path, number):
        if path == "0.parquet":
            raise OSError(5, "EIO")
        return group(self, unit, path, number)

    monkeypatch.setattr(FileReader, "_group", fails)
    ids, bad = [], {}
    for number in range(1, 9):
        write(
            tmp_path / f"{number}.parquet",
            range(10 * number, 10 * number + 10),
            age_s=50 - clock.now_s + NOW_S,
        )
        more, worse = drain(stream, places)
        ids, bad = ids + more, bad | worse
        clock.now_s += PATIENCE_S / 4
    assert (ids, len(bad)) == (list(range(10, 90)), 10)
    assert caplog.text.count("0.parquet cannot be read, and is tried again") == 1


def test_bad_rows_and_bad_files(tmp_path, clock, caplog):
    write(tmp_path / "1.parquet", [1, 2, -3, 4, 1 << 50, 6], age_s=90)
    (tmp_path / "2.parquet").write_bytes(b"PAR1 this is none")
    (tmp_path / "3.what").write_text("?")
    damaged = write(tmp_path / "4.parquet", range(100, 120), age_s=80)
    raw = bytearray(damaged.read_bytes())
    raw[4:200] = b"\0" * 196
    damaged.write_bytes(raw)
    write(tmp_path / "5.parquet", range(200, 203), age_s=70)
    for name in ("2.parquet", "3.what", "4.parquet"):
        os.utime(tmp_path / name, (NOW_S - 85, NOW_S - 85))
    stream, places = open_folder(tmp_path, clock)
    ids, bad, everything, read = [], {}, [], []
    for _ in range(2):
        while (fetched := stream.fetch(places, 1000)) is not None:
            read.append(fetched.begin)
            places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
            bad |= fetched.checked.bad
            everything += fetched.checked.bad.values()
            if fetched.checked.rows is not None:
                ids += ids_of([fetched.checked.rows])
        clock.now_s += PATIENCE_S + 1
    assert ids == [1, 2, 4, 6, 200, 201, 202]
    assert len(bad) == 20, "of the damaged file; its numbers are also those of the others"
    assert len(everything) == 2 + 1 + 1 + 20, "rows, and a record for each file that cannot be read"
    assert sum("cannot be read: " in reason for reason in everything) == 22
    unit = next(place for place in read if "2.parquet" in place.unit)
    assert stream.where("00", unit) == "2.parquet"
    assert stream.where("00", Place(f"{NOW_S:020.0f} a/b.parquet#000002+000004096", 5)) == (
        "a/b.parquet, row group 2, row 4,101"
    )
