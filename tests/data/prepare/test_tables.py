"""How many rows tables have, and what chance makes of their values."""

import numpy as np
import pytest

from data.prepare.tables import PUBLISHED, ROOMY_ROWS, roomy_rows, shared_values


@pytest.mark.parametrize("published", PUBLISHED)
def test_small_tables_have_room_and_large_ones_their_size(published):
    for num_values, rows in zip(PUBLISHED[published], roomy_rows(published), strict=True):
        assert rows == max(num_values, ROOMY_ROWS)
        if num_values <= 1000:
            assert shared_values(num_values, rows) <= 0.01
    assert sum(roomy_rows(published)) < 1.055 * sum(PUBLISHED[published])


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
