import pytest

from data.criteo import KAGGLE_CARDINALITIES, TERABYTE_CARDINALITIES
from data.synthetic import SyntheticConfig


def test_scaling_shrinks_large_tables_only():
    rows = SyntheticConfig(scale=0.001).table_rows
    for scaled, real in zip(rows, KAGGLE_CARDINALITIES, strict=True):
        assert scaled == (real if real < 1000 else max(1000, round(real / 1000)))
    assert SyntheticConfig(preset="terabyte", scale=1).table_rows == TERABYTE_CARDINALITIES


def test_default_data_set_has_between_fifty_and_a_hundred_thousand_table_rows():
    assert 50_000 < sum(SyntheticConfig().table_rows) < 100_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"preset": "avazu"}, "choose one of"),
        ({"format": "csv"}, "choose one of"),
        ({"compression": "xz"}, "choose one of"),
        ({"scale": 0}, "scale is 0"),
        ({"scale": 1.5}, "scale is 1.5"),
        ({"scale": float("nan")}, "scale is nan"),
        ({"drift": -0.1}, "drift is -0.1"),
        ({"top_coverage": 1.0}, "top_coverage is 1.0"),
        ({"seed": -1}, "seed is -1"),
        ({"days": 0}, "days is 0"),
        ({"rows_per_day": -5}, "rows_per_day is -5"),
        ({"rows_per_file": 100, "rows_per_block": 30}, "multiple"),
        ({"compression": "gz"}, "leave out the compression"),
        ({"format": "tsv", "multi_hot": True}, "Parquet for multi-hot"),
    ],
)
def test_bad_configuration_says_what_to_change(values, message):
    with pytest.raises(ValueError, match=message):
        SyntheticConfig(**values)


def test_a_day_is_cut_into_full_blocks_and_a_rest():
    config = SyntheticConfig(rows_per_day=250, rows_per_block=100, rows_per_file=200)
    assert config.blocks_of_day() == [100, 100, 50]
    assert SyntheticConfig(rows_per_day=200, rows_per_block=100, rows_per_file=200).blocks_of_day() == [
        100,
        100,
    ]
