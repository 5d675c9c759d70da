"""Flags' values: what is taken, what is refused."""

from pathlib import Path

import pytest

from data.criteo import KAGGLE_CARDINALITIES
from data.prepare.config import PrepareConfig, parse_bytes


def config(**changes):
    return PrepareConfig(**{"raw": (Path("day_0"),), "out": Path("out"), "num_processes": 2, **changes})


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


def test_tables_are_a_preset_one_number_or_26_and_capped():
    assert config(table_rows="kaggle", cap=1000).static_table_rows == tuple(
        min(rows, 1000) for rows in KAGGLE_CARDINALITIES
    )
    assert config(table_rows="500").static_table_rows == (500,) * 26
    rows = tuple(range(10, 36))
    assert config(table_rows=",".join(map(str, rows))).static_table_rows == rows


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"raw": ()}, "at least one raw file"),
        ({"ids": "md5"}, "--ids is one of modulo, hash, vocabulary, raw"),
        ({"table_rows": "1,2"}, "26 numbers"),
        ({"table_rows": "0"}, "between 1 and"),
        ({"table_rows": "terrabyte"}, "terabyte, kaggle"),
        ({"cap": 2}, "--cap is at least 3"),
        ({"min_count": 0}, "--min-count"),
        ({"num_days": 0}, "--days"),
        ({"num_processes": 0}, "--processes"),
        ({"max_bad_ratio": 1.5}, "--max-bad-ratio"),
        ({"memory_bytes": 100 << 20}, "fewer --processes"),
    ],
)
def test_what_is_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        config(**changes)


def test_the_memory_that_is_asked_for_is_enough():
    with pytest.raises(ValueError, match="need at least") as error:
        config(memory_bytes=100 << 20)
    needed = str(error.value).partition("--memory ")[2].partition(",")[0]
    assert config(memory_bytes=parse_bytes(needed)).block_bytes > 0


def test_processes_by_default_fit_the_memory(monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    few, many = config(num_processes=None), config(num_processes=None, memory_bytes=64 << 30)
    assert 1 < few.processes < 64
    assert few.block_bytes > 0
    assert many.processes == 64


def test_processes_memory_and_ratio_do_not_decide_the_output():
    assert config(num_processes=1, memory_bytes=3 << 30, max_bad_ratio=1).identity == config().identity
    assert config(ids="hash").identity != config().identity
    assert config(ids="raw", table_rows="1000").identity == config(ids="raw").identity == {"ids": "raw"}
