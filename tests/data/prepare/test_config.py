"""Flags' values: what is taken, what is refused."""

import pytest

from data.criteo import KAGGLE_CARDINALITIES, TERABYTE_CARDINALITIES
from data.jobs.command import parse_bytes
from data.jobs.location import Location
from data.prepare.config import PrepareConfig


def config(**changes):
    return PrepareConfig(
        **{"raw": (Location.of("day_0"),), "out": Location.of("out"), "num_processes": 2, **changes}
    )


def test_tables_are_a_preset_one_number_or_26_and_capped():
    assert config(table_rows="kaggle", cap=1000).static_table_rows == tuple(
        min(rows, 1000) for rows in KAGGLE_CARDINALITIES
    )
    assert config(table_rows="500").static_table_rows == (500,) * 26
    rows = tuple(range(10, 36))
    assert config(table_rows=",".join(map(str, rows))).static_table_rows == rows


def test_tables_by_default_are_those_of_the_files_and_roomy():
    for name, cardinalities in (("train.txt", KAGGLE_CARDINALITIES), ("day_7.gz", TERABYTE_CARDINALITIES)):
        assert config(raw=(Location.of(name),)).static_table_rows == tuple(
            min(max(rows, 100_000), 10_000_000) for rows in cardinalities
        )
    assert set(config(cap=1000).static_table_rows) == {1000}


def test_files_of_unknown_data_sets_need_table_rows_in_one_pass():
    raw = (Location.of("a"), Location.of("b"))
    for ids in ("modulo", "hash"):
        with pytest.raises(ValueError, match=r"not named day_N.*--table-rows"):
            config(raw=raw, ids=ids)
        assert config(raw=raw, ids=ids, table_rows="9").static_table_rows == (9,) * 26
    for ids in ("vocabulary", "raw"):
        assert config(raw=raw, ids=ids).published is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"raw": ()}, "at least one raw file"),
        ({"ids": "md5"}, "--ids is one of modulo, hash, vocabulary, raw"),
        ({"table_rows": "1,2"}, "26 numbers"),
        ({"table_rows": "0"}, "between 1 and"),
        ({"table_rows": "terrabyte"}, "terabyte, kaggle"),
        ({"cap": 2}, "--cap is at least 3"),
        ({"ids": "vocabulary", "min_count": 0}, "--min-count is at least 1"),
        ({"ids": "vocabulary", "table_rows": "kaggle"}, "--table-rows is for --ids modulo or hash; with"),
        ({"ids": "raw", "table_rows": "1000"}, "--ids raw nothing reads it, so leave it out"),
        ({"ids": "raw", "cap": 1000}, "--cap is for --ids modulo or hash or vocabulary; with --ids raw"),
        ({"ids": "hash", "min_count": 3}, "--min-count is for --ids vocabulary; with --ids hash"),
        ({"num_days": 0}, "--days"),
        ({"num_days": 10_001}, "--days is at most 10,000, not 10,001"),
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


def test_explicit_defaults_give_the_same_data_set():
    assert config(ids="vocabulary", min_count=3, cap=10_000_000).identity == config(ids="vocabulary").identity
