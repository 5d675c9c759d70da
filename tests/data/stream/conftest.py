"""Fixtures of streams: a clock, and a data set of raw rows."""

import pytest

from tests.data.stream.folders import Clock, write_labels


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


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
