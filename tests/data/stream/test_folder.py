"""Files that arrive in a folder: which records come, in which order, once each; and bad files."""

import logging
import os
import zlib
from pathlib import Path
from unittest.mock import Mock

import polars as pl
import pytest

from data.dataset import read_manifest
from data.jobs.location import Location
from data.stream.agreement import PartitionState
from data.stream.files import FileReader
from data.stream.folder import NUM_PARTITIONS, FolderStream
from data.stream.listing import PATIENCE_S, SETTLE_S
from data.stream.reader import PartitionReader, ReaderConfig
from data.stream.source import START, Place
from data.stream.units import Unit
from tests.data.stream.streams import MANIFEST, ids_of

NOW_S = 1_000_000.0


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = NOW_S
        monkeypatch.setattr("time.monotonic", lambda: self.now_s)

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def write(path: Path, ids: range | list[int], age_s: float = 100.0, **columns) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pl.DataFrame({"label": [each % 2 for each in ids], "price": [0.5] * len(ids), "item": list(ids)})
    frame.with_columns(**columns).write_parquet(path, row_group_size=3000)
    os.utime(path, (NOW_S - age_s, NOW_S - age_s))
    return path


def drain(
    stream: FolderStream, places: dict[str, Place], at_most: int = 1000
) -> tuple[list[int], dict[int, str]]:
    """Read all that has come from `places` on, and move them."""
    ids, bad = [], {}
    while (fetched := stream.fetch(places, at_most)) is not None:
        assert stream.waiting(fetched.partition, fetched.begin) >= fetched.end - fetched.begin.record
        places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
        bad |= fetched.checked.bad
        if fetched.checked.rows is not None:
            found = ids_of([fetched.checked.rows])
            assert len(found) == len(fetched.checked.records)
            ids += found
    return ids, bad


def open_folder(
    folder: Path, clock: Clock, dataset: str | None = None
) -> tuple[FolderStream, dict[str, Place]]:
    """A stream of encoded records, or of the raw ones of a data set."""
    manifest = MANIFEST if dataset is None else read_manifest(dataset)
    stream = FolderStream(str(folder), manifest, dataset or "nowhere", is_encoded=dataset is None, now=clock)
    return stream, dict.fromkeys(stream.partitions, START)


def test_files_come_once_in_the_order_in_which_they_were_written(tmp_path, clock):
    stream, places = open_folder(tmp_path / "in", clock)
    assert drain(stream, places) == ([], {}), "the folder is not there yet"
    write(tmp_path / "in" / "b.parquet", range(10_000), age_s=100)
    write(tmp_path / "in" / "deep" / "a.parquet", range(10_000, 12_000), age_s=50)
    clock.now_s += 2
    assert drain(stream, places) == (list(range(12_000)), {})
    assert sum(stream.waiting(name, place) for name, place in places.items()) == 0
    write(tmp_path / "in" / "0.parquet", range(12_000, 12_100), age_s=40)
    clock.now_s += 2
    assert drain(stream, places) == (list(range(12_000, 12_100)), {})
    again, _ = open_folder(tmp_path / "in", clock)
    assert drain(again, places) == ([], {}), "places are those of any process"


def test_ranks_share_a_file(tmp_path, clock):
    write(tmp_path / "one.parquet", range(60_000))
    stream, places = open_folder(tmp_path, clock)
    mine = dict(list(places.items())[0::2])
    its = dict(list(places.items())[1::2])
    first, _ = drain(stream, mine)
    second, _ = drain(open_folder(tmp_path, clock)[0], its)
    assert sorted(first + second) == list(range(60_000))
    assert min(len(first), len(second)) > 15_000


def test_a_place_in_the_middle_and_skipping(tmp_path, clock):
    write(tmp_path / "one.parquet", range(5000))
    stream, places = open_folder(tmp_path, clock)
    for _ in range(3):
        fetched = stream.fetch(places, 700)
        places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
    waiting = {name: stream.waiting(name, place) for name, place in places.items()}
    assert sum(waiting.values()) == 5000 - 2100
    for name, place in places.items():
        places[name], skipped = stream.skip(name, place, waiting[name] - 1 if waiting[name] else 5)
        assert skipped == max(0, waiting[name] - 1)
    ids, _ = drain(stream, places)
    assert ids == [2999, 4999], "the last record of each row group, which is a piece"


def test_a_file_that_is_being_written_is_left_alone(tmp_path, clock):
    path = write(tmp_path / "one.parquet", range(10), age_s=0)
    for name in ("_SUCCESS", ".hidden.parquet", "two.parquet.tmp"):
        write(tmp_path / name, range(3))
    stream, places = open_folder(tmp_path, clock)
    assert drain(stream, places) == ([], {})
    clock.now_s += SETTLE_S
    os.utime(path, (clock.now_s, clock.now_s))
    assert drain(stream, places) == ([], {}), "it was written to in between"
    clock.now_s += SETTLE_S + 1
    assert drain(stream, places) == (list(range(10)), {})


def test_a_file_from_before_those_that_were_read_is_told(tmp_path, clock, caplog):
    stream, places = open_folder(tmp_path, clock)
    write(tmp_path / "one.parquet", range(300_000), age_s=100)
    drain(stream, places)
    late = write(tmp_path / "two.parquet", range(300_000, 300_010), age_s=200)
    clock.now_s += 2
    with caplog.at_level(logging.WARNING):
        assert drain(stream, places) == ([], {})
    assert "two.parquet: 10 records are not trained" in caplog.text
    assert "touch" in caplog.text
    os.utime(late, (clock.now_s, clock.now_s))
    clock.now_s += SETTLE_S + 1
    assert drain(stream, places) == (list(range(300_000, 300_010)), {}), "what the message says to do"
    assert "has changed" not in caplog.text


def test_records_that_came_too_late_are_counted(tmp_path, clock):
    stream, places = open_folder(tmp_path, clock)
    write(tmp_path / "one.parquet", range(300_000), age_s=100)
    drain(stream, places)
    write(tmp_path / "two.parquet", range(100), age_s=200)
    clock.now_s += 2
    drain(stream, places)
    assert passed_over(stream, places) == 100
    assert passed_over(stream, places) == 0, "once"


@pytest.mark.parametrize("came", ["before the restart", "after it"])
def test_files_that_come_around_a_restart_with_an_older_time_are_counted(tmp_path, clock, caplog, came):
    stream, places = open_folder(tmp_path, clock)
    write(tmp_path / "one.parquet", range(300_000), age_s=100)
    drain(stream, places)
    counted = {name: stream.waiting(name, START) for name in places}
    again, _ = open_folder(tmp_path, clock)
    if came == "after it":
        assert drain(again, places) == ([], {})
        assert passed_over(again, places, counted) == 0
        clock.now_s += 2
    write(tmp_path / "two.parquet", range(300_000, 300_100), age_s=200)
    with caplog.at_level(logging.WARNING):
        assert drain(again, places) == ([], {})
    assert passed_over(again, places, counted) == 100
    assert passed_over(again, places, counted) == 0, "once"
    assert "touch" in caplog.text


def passed_over(stream: FolderStream, places: dict[str, Place], counted: dict[str, int] | None = None) -> int:
    return sum(
        stream.passed_over(name, place, counted=1_000_000 if counted is None else counted[name], size=0)
        for name, place in places.items()
    )


@pytest.mark.parametrize("fate", ["deleted", "replaced"])
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_a_file_that_goes_while_no_run_reads_is_told_and_its_rest_counted_once(
    tmp_path, clock, caplog, monkeypatch, raw_dataset, fate, ending
):
    monkeypatch.setattr("data.stream.files.BLOCK_BYTES", 4000)
    folder, dataset = tmp_path / "in", raw_dataset if ending == "jsonl" else None
    folder.mkdir()

    def put(name, num_records, age_s):
        path = write_labels(folder / f"{name}.{ending}", num_records, label=0)
        os.utime(path, (NOW_S - age_s, NOW_S - age_s))
        return path

    whole, read = put("whole", 100, age_s=200), put("cut", 1000, age_s=100)
    states = restarted(folder, clock, {}, chunk=300, reads=3, dataset=dataset)
    num_trained = sum(each.trained for each in states.values())
    assert 100 < num_trained < 1100
    read.unlink()
    whole.unlink()  # all of it was read: this is how users make room
    new = 50  # fewer than those that were read
    put("cut" if fate == "replaced" else "other", new, age_s=50)
    with caplog.at_level(logging.WARNING):
        again = restarted(folder, clock, states, chunk=5000, reads=8, dataset=dataset, pause_s=PATIENCE_S / 2)
    assert sum(each.left_out for each in again.values()) == 1100 - num_trained
    assert sum(each.trained for each in again.values()) == num_trained + new
    assert sum(each.bad for each in again.values()) == 0
    assert caplog.text.count(f"cut.{ending} was deleted, renamed or replaced before all of it was read") == 1
    assert "whole" not in caplog.text
    assert restarted(folder, clock, again, chunk=5000, reads=5, dataset=dataset) == again, "once"


def test_a_file_that_goes_while_no_run_reads_is_part_of_what_the_backlog_leaves_out(tmp_path, clock):
    """Of the oldest records, which the policy leaves out, those that are gone are the first."""
    first, second = same_partition(2)
    cut = write(tmp_path / first, range(1000), age_s=100)
    states = restarted(tmp_path, clock, {}, chunk=300, reads=1, backlog=1000)
    cut.unlink()
    write(tmp_path / second, range(1000, 2000), age_s=90)
    found = restarted(tmp_path, clock, states, chunk=5000, reads=8, backlog=1000, pause_s=PATIENCE_S / 2)
    (again,) = found.values()
    assert (again.trained, again.left_out, again.bad) == (300 + 900, 700 + 100, 0), "0.9 of the limit is kept"


def same_partition(number: int, ending: str = "parquet") -> list[str]:
    """Names of files whose records belong to one partition."""
    names = [f"{each}.{ending}" for each in range(10_000)]
    return [each for each in names if zlib.crc32(each.encode()) % NUM_PARTITIONS == 7][:number]


def restarted(
    folder: Path,
    clock: Clock,
    states: dict[str, PartitionState],
    chunk: int,
    reads: int,
    dataset: str | None = None,
    backlog: int = 0,
    pause_s: float = 0,
) -> dict[str, PartitionState]:
    """States after a process has read some chunks from others on, of partitions of which any was counted."""
    stream, places = open_folder(folder, clock, dataset)
    left = {name: PartitionState.from_json(states.get(name, PartitionState()).to_json()) for name in places}
    reader = PartitionReader(stream, left, ReaderConfig(ahead=100_000, chunk=chunk, backlog=backlog))
    for _ in range(reads):
        reader.read_once()
        clock.now_s += pause_s
    stream.close()
    return {name: state for name, state in reader._states.items() if state.counted}


def test_a_file_that_grows_after_it_was_read_is_told(tmp_path, clock, caplog):
    write(tmp_path / "one.parquet", range(10))
    stream, places = open_folder(tmp_path, clock)
    drain(stream, places)
    write(tmp_path / "one.parquet", range(20), age_s=50)
    clock.now_s += 2
    assert drain(stream, places) == (list(range(20)), {})
    assert "one.parquet has changed since it was found: all its records count as new" in caplog.text


def test_the_newest_and_the_oldest_files_of_all_partitions(tmp_path, clock):
    for number in range(20):
        write(
            tmp_path / f"{number}.parquet", range(100 * number, 100 * number + 100), age_s=5000 - 100 * number
        )
    for newest in (True, False):
        stream, places = open_folder(tmp_path, clock)
        waiting = {name: stream.waiting(name, place) for name, place in places.items()}
        shares = stream.shares(places, 250, newest=newest)
        assert sum(shares.values()) == 250
        for name, place in places.items():
            skipped = waiting[name] - shares[name] if newest else 0
            places[name], _ = stream.skip(name, place, skipped)
        ids, _ = drain(stream, places)
        if newest:
            assert sorted(ids) == list(range(1750, 2000))


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
    assert not caplog.text


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


def test_a_file_that_cannot_be_read_after_a_restart_is_counted(tmp_path, clock, monkeypatch):
    (name,) = same_partition(1)
    write(tmp_path / name, range(700))
    states = restarted(tmp_path, clock, {}, chunk=300, reads=2)
    monkeypatch.setattr(FileReader, "pieces", Mock(side_effect=OSError(5, "EIO")))
    (state,) = restarted(tmp_path, clock, states, chunk=300, reads=10, pause_s=PATIENCE_S / 2).values()
    assert (state.trained, state.left_out, state.bad) == (600, 0, 100)


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


def test_records_that_come_late_behind_skipped_ones_are_counted(tmp_path, clock):
    first, second = same_partition(2)
    write(tmp_path / first, range(1000), age_s=90)
    stream, places = open_folder(tmp_path, clock)
    assert sum(passed_over(stream, places) for _ in range(2)) == 0
    (partition,) = [name for name, place in places.items() if stream.waiting(name, place)]
    places[partition], count = stream.skip(partition, places[partition], 1000)
    assert count == 1000
    write(tmp_path / second, range(500), age_s=100)
    clock.now_s += 2
    assert passed_over(stream, places) == 500


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


@pytest.fixture(scope="module")
def raw_dataset(tmp_path_factory):
    """A data set whose raw rows have the columns of its encoded ones."""
    from data.convert.__main__ import main  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("set")
    write_labels(folder / "raw.jsonl", 100, label=0)
    (folder / "schema.toml").write_text(
        '[label]\ncolumn = "label"\n[[dense]]\ncolumn = "price"\n'
        '[[sparse]]\ncolumn = "item"\nids = "hash"\nrows = 100\n'
    )
    assert main([str(folder / "schema.toml"), str(folder / "raw.jsonl"), "--out", str(folder / "set")]) == 0
    return str(folder / "set")


def write_labels(path, num_records, label):
    frame = pl.DataFrame({"label": label, "price": 0.5, "item": range(num_records)})
    frame.write_parquet(path, row_group_size=3000) if "parquet" in path.name else frame.write_ndjson(path)
    return path


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


def test_number_of_partitions():
    assert NUM_PARTITIONS == 64, "it is part of saved positions"


RAW = "clicked\tshop\titem\n1\ta\tx\n0\tb\ty\nmaybe\ta\tx\n1\tnew\tz\n"


def test_raw_rows_are_encoded_as_the_data_set_was(tmp_path, clock):
    from data.convert.__main__ import main  # noqa: PLC0415

    header, *lines = RAW.replace("maybe\ta\tx\n", "").splitlines(keepends=True)
    (tmp_path / "raw.tsv").write_text(header + "".join(lines) * 20)
    (tmp_path / "schema.toml").write_text(
        '[label]\ncolumn = "clicked"\n'
        '[[sparse]]\ncolumn = "shop"\nids = "vocabulary"\n[[sparse]]\ncolumn = "item"\nids = "vocabulary"\n'
    )
    dataset = str(tmp_path / "set")
    assert main([str(tmp_path / "schema.toml"), str(tmp_path / "raw.tsv"), "--out", dataset]) == 0
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "1.tsv").write_text(RAW)
    pl.read_csv(RAW.encode(), separator="\t").write_parquet(folder / "2.parquet")
    pl.read_csv(RAW.encode(), separator="\t").write_ndjson(folder / "3.jsonl")
    (folder / "4.tsv").write_text("clicked\tshop\n1\ta\n")
    for path in folder.iterdir():
        os.utime(path, (NOW_S - 100, NOW_S - 100))
    stream = FolderStream(str(folder), read_manifest(dataset), dataset, is_encoded=False, now=clock)
    places = dict.fromkeys(stream.partitions, START)
    rows, bad = [], []
    while (fetched := stream.fetch(places, 2)) is not None:
        places[fetched.partition] = Place(fetched.begin.unit, fetched.end)
        bad += fetched.checked.bad.values()
        if (found := fetched.checked.rows) is not None:
            columns = [found.label.values, *(column.values for column in found.ids)]
            rows += list(zip(*(each.astype(int).tolist() for each in columns), strict=True))
    trained = pl.read_parquet(f"{dataset}/day=*/*.parquet")
    known = set(trained.select("clicked", "shop", "item").rows())
    assert len(rows) == 9
    assert {row[0] for row in rows} == {0, 1}
    assert set(rows) <= known
    assert len(bad) == 4
    assert sum("clicked is not 0 or 1" in reason for reason in bad) == 3
    assert sum(reason.startswith("cannot be read: ") for reason in bad) == 1, "a file without a column"
