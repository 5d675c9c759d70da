"""A file is there whole or not at all."""

import hashlib
import resource

import pytest

from data.prepare.pieces import PieceRecord, durable_file, read_records, remove_leftovers


def test_a_durable_file_knows_its_digest_and_size(tmp_path):
    with durable_file(tmp_path / "a" / "file") as sink:
        sink.write(b"one")
        sink.write(b"two")
    assert (tmp_path / "a" / "file").read_bytes() == b"onetwo"
    assert (sink.num_bytes, sink.sha256) == (6, hashlib.sha256(b"onetwo").hexdigest())


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail():
        with durable_file(path) as sink:
            sink.write(b"new")
            raise KeyError("failed")

    with pytest.raises(KeyError):
        fail()
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


def test_a_file_that_does_not_fit_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match="too large"), durable_file(tmp_path / "file") as sink:
            sink.write(bytes(5000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_records_come_back_as_they_were_written(tmp_path):
    record = PieceRecord(
        name="day=3/part-00007",
        raw_name="day_3",
        day=3,
        index=7,
        start=10,
        end=99,
        last=True,
        num_lines=5,
        num_rejects={"hex": 1},
        row_groups=(3, 1),
        num_bytes=70,
        sha256="ab",
    )
    record.write(tmp_path)
    assert read_records(tmp_path) == {"day=3/part-00007": record}
    assert record.num_rows == 4


def test_leftovers_of_a_killed_process_go(tmp_path):
    (tmp_path / "day=0").mkdir()
    (tmp_path / "day=0" / "part-00000.parquet.123.tmp").touch()
    (tmp_path / "day=0" / "part-00001.parquet").touch()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.rglob("*.*")] == ["part-00001.parquet"]
