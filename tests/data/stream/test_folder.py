"""Files that arrive in a folder: which records come, in which order, once each."""

import logging
import os

import polars as pl
import pytest

from data.dataset import read_manifest
from data.stream.folder import NUM_PARTITIONS, FolderStream
from data.stream.listing import SETTLE_S
from data.stream.source import START, Known, Place
from tests.data.stream.folders import NOW_S, drain, late_records, open_folder, same_partition, write


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
    for name in ("_SUCCESS", ".hidden.parquet", "two.parquet.tmp", "part.tmp/1.parquet"):
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
    assert "two.parquet is older than files that were read already: some or all" in caplog.text
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
    for _ in range(2):
        drain(stream, places)
        assert late_records(stream) == 100, "once"
        clock.now_s += 2


@pytest.mark.parametrize("came", ["before the restart", "after it"])
def test_files_that_come_around_a_restart_with_an_older_time_are_counted(tmp_path, clock, caplog, came):
    stream, places = open_folder(tmp_path, clock)
    write(tmp_path / "one.parquet", range(300_000), age_s=100)
    drain(stream, places)
    again, _ = open_folder(tmp_path, clock)
    for name, place in places.items():
        again.expect(name, place, Known(sorted(stream.found(name, 0))))
    if came == "after it":
        assert drain(again, places) == ([], {})
        assert late_records(again) == 0
        clock.now_s += 2
    write(tmp_path / "two.parquet", range(300_000, 300_100), age_s=200)
    with caplog.at_level(logging.WARNING):
        assert drain(again, places) == ([], {})
    assert late_records(again) == 100
    assert "touch" in caplog.text


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


def test_records_that_come_late_behind_skipped_ones_are_counted(tmp_path, clock):
    first, second = same_partition(2)
    write(tmp_path / first, range(1000), age_s=90)
    stream, places = open_folder(tmp_path, clock)
    (partition,) = [name for name, place in places.items() if stream.waiting(name, place)]
    places[partition], count = stream.skip(partition, places[partition], 1000)
    assert count == 1000
    write(tmp_path / second, range(500), age_s=100)
    clock.now_s += 2
    drain(stream, places)
    assert late_records(stream) == 500


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
