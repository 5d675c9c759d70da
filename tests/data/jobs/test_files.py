"""A file is there whole or not at all."""

import hashlib
from contextlib import suppress

import numpy as np
import polars as pl
import pytest

from data.jobs.files import durable_file, remove_leftovers
from data.jobs.location import Location


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


def test_a_write_that_fails_leaves_nothing(tmp_path, no_file_longer_than):
    with (
        no_file_longer_than(1000),
        pytest.raises(OSError, match="too large"),
        durable_file(tmp_path / "file") as sink,
    ):
        sink.write(bytes(5000))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9999, 1.0])
def test_a_write_that_fails_below_a_library_is_no_error_of_that_library(share, tmp_path, no_file_longer_than):
    """Polars says `ComputeError: File out of specification` if it is the last bytes that find no room."""
    samples = pl.DataFrame({"value": np.random.default_rng(0).standard_normal(100_000)})
    with durable_file(tmp_path / "whole") as sink:
        samples.write_parquet(sink)
    with (
        no_file_longer_than(int(share * (sink.num_bytes - 1))),
        pytest.raises(OSError, match="too large"),
        durable_file(tmp_path / "file") as sink,
    ):
        samples.write_parquet(sink)
    assert [each.name for each in tmp_path.iterdir()] == ["whole"]


def test_what_interrupts_a_write_that_failed_keeps_its_name(tmp_path, no_file_longer_than):
    def interrupted():
        with durable_file(tmp_path / "file") as sink:
            with suppress(OSError):
                sink.write(bytes(100_000))
            raise KeyboardInterrupt

    with no_file_longer_than(0), pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_temporary_files_of_a_killed_process_are_removed(tmp_path):
    (tmp_path / "day=0").mkdir()
    (tmp_path / "day=0" / "part-00000.parquet.123.tmp").touch()
    (tmp_path / "day=0" / "part-00001.parquet").touch()
    remove_leftovers(Location.of(tmp_path))
    assert [path.name for path in tmp_path.rglob("*.*")] == ["part-00001.parquet"]
