"""How many rows tables have, and what chance makes of their values."""

from pathlib import Path

import numpy as np
import pytest

from data.criteo import KAGGLE_CARDINALITIES, TERABYTE_CARDINALITIES
from data.prepare.tables import PUBLISHED, ROOMY_ROWS, parse_rows, published_as, roomy_rows, shared_values


@pytest.mark.parametrize(
    ("names", "published"),
    [
        (["train.txt"], "kaggle"),
        (["train.txt.gz"], "kaggle"),
        (["day_0"], "terabyte"),
        (["day_3.gz", "day_4.gz"], "terabyte"),
    ],
)
def test_published_sizes_follow_from_file_names(names, published):
    assert published_as([Path(name) for name in names]) == published


def test_several_files_without_days_need_table_rows():
    with pytest.raises(ValueError, match="give the rows of the tables with --table-rows terabyte, kaggle"):
        published_as([Path("a.txt"), Path("b.txt")])


@pytest.mark.parametrize("published", PUBLISHED)
def test_small_tables_have_room_and_large_ones_their_size(published):
    for num_values, rows in zip(PUBLISHED[published], roomy_rows(published), strict=True):
        assert rows == max(num_values, ROOMY_ROWS)
        if num_values <= 1000:
            assert shared_values(num_values, rows) <= 0.01
    assert sum(roomy_rows(published)) < 1.055 * sum(PUBLISHED[published])


def test_published_names_mean_the_published_sizes():
    assert parse_rows("kaggle") == KAGGLE_CARDINALITIES
    assert parse_rows("terabyte") == TERABYTE_CARDINALITIES


@pytest.mark.parametrize(("num_values", "rows"), [(3, 3), (1000, 1000), (1000, 100_000), (40_000, 10_000)])
def test_expected_share_of_collisions_is_that_of_random_rows(num_values, rows):
    rng = np.random.default_rng(0)
    shares = []
    for _ in range(max(10, 9000 // num_values)):
        ids = rng.integers(2**32, size=num_values) % rows
        shares.append((np.bincount(ids)[ids] > 1).mean())
    assert np.mean(shares) == pytest.approx(shared_values(num_values, rows), abs=0.02)


def test_one_value_has_its_row_alone_and_one_row_holds_all():
    assert shared_values(1, 1) == shared_values(1, 5) == 0
    assert shared_values(2, 1) == 1
