"""Flags of all jobs: values that are taken, and that are refused."""

import pytest

from data.jobs.command import parse_bytes


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2G", 2 << 30), ("1.5m", 3 << 19), ("64KiB", 65536), ("12", 12), ("1GB", 1 << 30)],
)
def test_sizes(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "2X", "-1G", "2 G G"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="not a size"):
        parse_bytes(text)
